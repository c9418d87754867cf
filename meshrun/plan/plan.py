"""A launch as a value: the node, coordinate and device of every rank, and what they run.

``build_plan`` turns a request and the facts of this machine into a LaunchPlan; a dry run prints
that very object and a launch executes it. Nothing here touches a process, a socket or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshrun.errors import UsageError
from meshrun.host.machine import UNKNOWN_HOST, Gpu, HostFacts
from meshrun.layout import Layout, count_slots, solve_layout
from meshrun.layout.selection import find_debugged, ranks_shown
from meshrun.plan.device import (
    COUNTED,
    DeviceChoice,
    choose_device,
    device_name,
    only_torch_counts,
)
from meshrun.plan.gpu_choice import check_enough, choose_gpus
from meshrun.plan.numa import bind_cpus
from meshrun.plan.parse import parse_endpoint
from meshrun.plan.rank_program import Program
from meshrun.plan.rendezvous_config import RendezvousConfig, plan_rendezvous
from meshrun.plan.request import ConsoleRequest, LaunchRequest, Rendezvous, StartMethod

LOOPBACK_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: its numbers, its coordinate and its device."""

    rank: int
    node_rank: int
    local_rank: int
    coordinate: tuple[int, ...]
    device: str | None
    """torch device such as ``cuda:3`` or ``cpu``; ``None`` where the program chooses."""
    cpus: tuple[int, ...] | None = None
    """Logical CPUs it is bound to; ``None`` if it may use all."""
    gpu: Gpu | None = None
    """The GPU that its device is; ``None`` where that is unknown, as on other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything decided about a launch before anything is started."""

    request: LaunchRequest
    layout: Layout
    slots_per_node: tuple[int, ...]
    """Workers that each node might have; the layout uses as many or fewer."""
    domain: str
    """What NVML or the scheduler calls the domain of this node, where it was looked for."""
    waits_for_domains: bool
    """Whether the domains are known, and ``--intra-domain`` is checked, once all nodes joined."""
    device: DeviceChoice
    """Of the mesh; without one, the program chooses."""
    start_method: StartMethod
    start_method_reason: str
    omp_num_threads: int
    """Threads a rank's OpenMP may use; where a node has several workers, and nobody set
    ``OMP_NUM_THREADS``, that says so."""
    store_address: str
    """Where the ranks' store listens: loopback, unless another address was asked for."""
    store_port: int
    """Its port; 0 for a free one."""
    shown: frozenset[int] | None
    """Ranks whose output is printed; ``None`` for all."""
    debugged: int | None
    """The rank that gets the terminal, if any."""
    bound_cpus: tuple[tuple[int, ...], ...] | None
    """Logical CPUs of each local rank; ``None`` without ``--numa-binding``."""
    host: HostFacts
    """This machine, as if it had no other accelerators than those that the launch may use."""
    rendezvous: RendezvousConfig | None = None
    """Where the nodes meet; ``None`` where there is but this one."""
    node_rank: int = 0
    roles: tuple[str, ...] = ()
    """What each node calls its workers; empty until the nodes have met."""

    @property
    def program(self) -> Program:
        """What each rank runs."""
        return self.request.program

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may come and go once the launch has begun."""
        return self.rendezvous is not None and self.rendezvous.is_elastic

    @property
    def spares(self) -> tuple[tuple[int, int], ...]:
        """(node rank, slots that no rank takes) of each node that has any."""
        counts = zip(self.slots_per_node, self.layout.nproc_per_node, strict=True)
        left = ((node, slots - used) for node, (slots, used) in enumerate(counts))
        return tuple((node, count) for node, count in left if count)

    @property
    def device_type(self) -> str | None:
        """torch device type of the mesh; ``None`` without a mesh, where the program chooses."""
        return self.device.type

    @property
    def uncounted_device(self) -> str | None:
        """The device type that ranks are to find for themselves once torch is imported, if any."""
        return self.device_type if self.device.counted_later else None

    @property
    def modules_of_mesh(self) -> tuple[str, ...]:
        """What may bring the mesh's device or backends, and so is imported before it is built."""
        brought = self.device_type not in (None, *COUNTED) or self.request.groups.backends
        return self.request.own_preload if brought else ()

    def rank(self, rank: int) -> RankPlan:
        """Return the plan of one rank."""
        node_rank, local_rank = self.layout.slot(rank)
        is_here = node_rank == self.node_rank and local_rank < len(self.host.gpus)
        has_gpu = is_here and (bool(self.request.gpus) or self.device_type not in (None, "cpu"))
        return RankPlan(
            rank=rank,
            node_rank=node_rank,
            local_rank=local_rank,
            coordinate=self.layout.coordinate(rank),
            device=device_name(self.device_type, self.device_index(local_rank)),
            cpus=self.bound_cpus[local_rank] if self.bound_cpus else None,
            gpu=self.host.gpus[local_rank] if has_gpu else None,
        )

    def device_index(self, local_rank: int) -> int:
        """Return the number by which a rank knows its device: 0 where it sees no other."""
        return 0 if self.request.virtual_local_rank else local_rank

    def place_in_role(self, rank: int) -> tuple[int, int]:
        """Return (place among the ranks of the same role, how many these are)."""
        if len(set(self.roles)) < 2:
            return rank, self.layout.world_size
        role = self.roles[self.layout.node_rank(rank)]
        nodes = [node_rank for node_rank, other in enumerate(self.roles) if other == role]
        ranks = sorted(r for node_rank in nodes for r in self.layout.ranks_of_node(node_rank))
        return ranks.index(rank), len(ranks)

    def devices_seen(self, local_rank: int) -> str | None:
        """Return the list of devices that a rank may see, or ``None`` if it sees all."""
        visible = self.host.visible_devices
        if self.request.virtual_local_rank:
            return visible[local_rank] if visible else str(local_rank)
        return ",".join(visible or ()) if self.request.gpus else None

    def ranks(self) -> Iterator[RankPlan]:
        """Yield the plan of every rank on every node, in order."""
        return (self.rank(rank) for rank in range(self.layout.world_size))

    @property
    def used_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of this node that its ranks use, or may use where the program chooses."""
        if self.device_type is None:
            return self.host.gpus
        return tuple(rank.gpu for rank in self.ranks_of_node() if rank.gpu is not None)

    def ranks_of_node(self) -> Iterator[RankPlan]:
        """Yield the plans of the ranks that this node starts."""
        return (self.rank(rank) for rank in self.layout.ranks_of_node(self.node_rank))


def build_plan(
    request: LaunchRequest,
    facts: HostFacts,
    *,
    check_host: bool = True,
    nodes_per_domain: tuple[int, ...] = (),
) -> LaunchPlan:
    """Decide everything about a launch.

    Args:
        request: What the user asked for.
        facts: This machine.
        check_host: Whether a device this machine lacks is an error; a dry run may plan for
            machines that are not here.
        nodes_per_domain: Number of nodes in each domain, once the nodes have met.

    Raises:
        LayoutError: If mesh, nodes and workers do not fit, with the arithmetic.
        UsageError: If a device was asked for that is not here.
    """
    if request.remote is not None:
        facts = replace(facts, gpus=(), links=None)  # which are not where the ranks will be
    facts = choose_gpus(request.gpus, facts, check_host=check_host)
    asked = _workers(request, facts)
    domain = facts.domain or ("" if request.domain_size else request.rendezvous.domain)
    is_elsewhere = facts == UNKNOWN_HOST or request.remote is not None
    is_told_later = bool(domain or is_elsewhere or request.rendezvous.step_of)
    waits = _needs_domains(request) and is_told_later and not nodes_per_domain
    layout = solve_request(
        replace(request, intra_domain=()) if waits else request,
        nnodes=request.nnodes,
        nproc_per_node=asked,
        nodes_per_domain=nodes_per_domain,
    )
    workers = max(layout.nproc_per_node)
    device = DeviceChoice(None, "chosen by the program")
    if layout.mesh is not None:
        device = choose_device(
            request.device,
            workers,
            kind=facts.accelerator,
            count=facts.accelerator_count,
            check_host=check_host,
        )
        request.groups.check_backends(device.type)
        if request.gpus is not None:
            check_enough(request.gpus, workers, device)
            device = DeviceChoice(device.type, f"--gpus names {len(request.gpus)}")
    _check_visible(request, workers, device.type, facts)
    request.groups.check_dims((*layout.dim_labels, *layout.derived_dims))
    start_method, reason = _choose_start_method(request)
    address, port = _choose_store(request.rendezvous)
    rendezvous = plan_rendezvous(
        request.rendezvous, nnodes=layout.nnodes, node_timeout_s=request.node_timeout_s
    )
    if rendezvous is not None:
        address, port = LOOPBACK_ADDRESS, 0
    if port or rendezvous is not None:  # a node rank counts only where a port was given
        _check_node_rank(request.rendezvous, layout.nnodes)
    return LaunchPlan(
        request=request,
        layout=layout,
        slots_per_node=count_slots(request.mesh, request.nnodes, asked),
        domain=domain,
        waits_for_domains=waits,
        device=device,
        start_method=start_method,
        start_method_reason=reason,
        omp_num_threads=max(1, facts.usable_cores // workers),
        store_address=address,
        store_port=port,
        shown=_choose_shown(request.console, layout),
        debugged=find_debugged(layout, request.debug_rank),
        bound_cpus=_bind(request, workers, facts, check_host),
        host=facts,
        rendezvous=rendezvous,
        node_rank=(request.rendezvous.node_rank or 0) if rendezvous is not None else 0,
    )


def _needs_domains(request: LaunchRequest) -> bool:
    """Whether the nodes have to tell each other which domains they are in."""
    return bool(request.intra_domain and not request.domain_size and (request.nnodes or 1) > 1)


def solve_request(
    request: LaunchRequest,
    *,
    nnodes: int | None,
    nproc_per_node: int | Sequence[int] | None,
    nodes_per_domain: Sequence[int] = (),
) -> Layout:
    """Return the layout of a launch over so many nodes and workers.

    Raises:
        LayoutError: If mesh, nodes and workers do not fit, with the arithmetic.
    """
    return solve_layout(
        request.mesh,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        flattens=request.flattens,
        views=request.views,
        intra_node=request.intra_node,
        intra_domain=request.intra_domain,
        domains=nodes_per_domain or request.domain_size,
        renumber=request.renumber,
    )


def complete_plan(
    plan: LaunchPlan,
    facts: HostFacts,
    *,
    node_rank: int,
    nproc_per_node: tuple[int, ...],
    nodes_per_domain: tuple[int, ...] = (),
    roles: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan once the nodes have met, and it is known who they are.

    Raises:
        LayoutError: If the mesh does not fit what has come together.
    """
    request = plan.request
    counts = request.nproc_per_node if isinstance(request.nproc_per_node, tuple) else nproc_per_node
    rendezvous = replace(request.rendezvous, node_rank=node_rank, least_nodes=None)
    settled = replace(
        request,
        nnodes=len(nproc_per_node),
        nproc_per_node=counts,
        rendezvous=rendezvous,
    )
    if not facts.accelerator_count:  # torch may have been asked before
        kind, found = plan.host.accelerator, plan.host.accelerator_count
        facts = replace(facts, accelerator=kind, accelerator_count=found)
    completed = build_plan(settled, facts, nodes_per_domain=nodes_per_domain)
    return replace(completed, roles=roles)


def depends_on_count(request: LaunchRequest) -> str | None:
    """Return a device type that only torch can count, if the plan depends on how many there are.

    ``auto`` stands for the one that torch has, if it has any.
    """
    return only_torch_counts(
        request.nproc_per_node,
        request.device,
        infers=request.nproc_per_node is None and _is_inferred(request),
        has_mesh=request.mesh is not None,
    )


def _is_inferred(request: LaunchRequest) -> bool:
    return request.mesh is not None and request.mesh.is_inferred


def _workers(request: LaunchRequest, facts: HostFacts) -> int | tuple[int, ...] | None:
    """Return the workers of a node if the request says, in numbers or by its devices."""
    asked = request.nproc_per_node
    if asked is None:
        if _is_inferred(request) and request.device != "cpu" and facts.accelerator_count:
            return facts.accelerator_count
        return None
    if not isinstance(asked, str):
        return asked
    kind = "cuda" if asked == "gpu" else asked
    if kind == "cpu" or (kind == "auto" and not facts.accelerator_count):
        return facts.usable_cores
    if kind in ("auto", facts.accelerator) and facts.accelerator_count:
        return facts.accelerator_count
    raise UsageError(
        f"--nproc-per-node {asked}: this machine has no device of type `{kind}`"
        + (f", only `{facts.accelerator}`" if facts.accelerator_count else ""),
        hint="use a number, auto, or cpu for one worker per core",
    )


def _check_node_rank(asked: Rendezvous, nnodes: int) -> None:
    if (asked.node_rank or 0) >= nnodes:
        raise UsageError(
            f"--node-rank must be from 0 to {nnodes - 1}, found {asked.node_rank}",
            hint="number nodes from 0, and check --nnodes",
        )


def _check_visible(
    request: LaunchRequest, workers: int, device_type: str | None, facts: HostFacts
) -> None:
    if request.virtual_local_rank and device_type not in (None, *COUNTED):
        raise UsageError(
            f"--virtual-local-rank: no known variable limits a rank to one {device_type} device",
            hint="remove it: each rank then uses the device of its local rank",
        )
    visible = facts.visible_devices
    if not visible:
        return
    source = "--gpus" if request.gpus else facts.visibility[0]
    if request.virtual_local_rank and len(visible) < workers:
        raise UsageError(
            f"--virtual-local-rank needs a device for each of {workers} workers, but"
            f" {source} lists {len(visible)}"
        )
    instances = sum(name.startswith("MIG-") for name in visible)
    if min(instances, workers) > 1 and not request.virtual_local_rank:
        raise UsageError(
            f"{source} lists {instances} MIG instances for {workers} workers, but CUDA shows a"
            " process only one",
            hint="use --virtual-local-rank, which shows each rank only its own",
        )


def _choose_start_method(request: LaunchRequest) -> tuple[StartMethod, str]:
    if request.program.kind == "command":
        return "exec", "the program is a command"
    if request.start_method is not None:
        return request.start_method, "as requested"
    return "fork", "torch is imported once and ranks are forked"


def _choose_store(asked: Rendezvous) -> tuple[str, int]:
    """Return the address and port of the store, as torchrun would on one node, on loopback."""
    host, port = asked.master_addr, asked.master_port
    if asked.endpoint:
        host, port = parse_endpoint(asked.endpoint)
    if asked.standalone or asked.backend != "static":
        return asked.local_addr or LOOPBACK_ADDRESS, 0
    if port is None:  # torchrun then looks at no other option either
        return asked.local_addr or LOOPBACK_ADDRESS, 0
    return (host or LOOPBACK_ADDRESS).strip("[]"), port


def _choose_shown(console: ConsoleRequest, layout: Layout) -> frozenset[int] | None:
    is_first_only = console.nodes == "first-node" and layout.nnodes > 1
    if not (console.show or console.hide or console.local_ranks is not None or is_first_only):
        return None
    shown = set(layout.ranks_of_node(0) if is_first_only else range(layout.world_size))
    shown &= ranks_shown(layout, console.show, console.hide)
    if console.local_ranks is not None:
        shown = {rank for rank in shown if layout.local_rank(rank) in console.local_ranks}
    return frozenset(shown)


def _bind(
    request: LaunchRequest, workers: int, facts: HostFacts, check_host: bool
) -> tuple[tuple[int, ...], ...] | None:
    mode, topology = request.numa_binding, facts.topology
    if mode is None or topology is None:
        return None
    try:
        return tuple(
            bind_cpus(mode, topology, local_rank=local_rank, nproc=workers)
            for local_rank in range(workers)
        )
    except UsageError:
        if check_host:
            raise
        return None  # a dry run may plan for machines that are not here


def check_elsewhere(request: LaunchRequest, facts: HostFacts) -> None:
    """Check a launch on other machines, as far as possible from here.

    Raises:
        UsageError: If it does not, whatever devices the machines have.
    """
    counts = request.nproc_per_node
    is_open = counts is None and _is_inferred(request)
    if not isinstance(counts, str) and not is_open:  # else the devices of those machines decide
        build_plan(request, replace(facts, gpus=()), check_host=False)
