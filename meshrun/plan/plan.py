"""A launch as a value: the node, coordinate and device of every rank, and the program.

``build_plan`` turns a request and the facts about this machine into a LaunchPlan. A dry run prints
this object; a launch executes it. Nothing here touches a process, a socket or torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import HostError, UsageError
from meshrun.host.machine import UNKNOWN_HOST, Gpu, HostFacts
from meshrun.host.shortage import REFUSED
from meshrun.layout import Layout, count_slots, solve_layout
from meshrun.layout.selection import find_debugged, ranks_shown
from meshrun.plan.choices import StartMethod
from meshrun.plan.device import COUNTED, DeviceChoice, choose_device, device_name
from meshrun.plan.hardware import check_cuda_shows, check_enough, choose_cpus, choose_gpus
from meshrun.plan.rank_program import Program
from meshrun.plan.rendezvous_config import RendezvousConfig, plan_rendezvous
from meshrun.plan.rendezvous_options import STATIC
from meshrun.plan.request import ConsoleRequest, LaunchRequest, Rendezvous

LOOPBACK_ADDRESS = "127.0.0.1"


class RankPlan(Struct, frozen=True, kw_only=True):
    """One rank: its numbers, its coordinate and its device."""

    rank: int
    node_rank: int
    local_rank: int
    coordinate: tuple[int, ...]
    device: str | None
    """torch device such as ``cuda:3`` or ``cpu``; ``None`` if the program chooses."""
    cpus: tuple[int, ...] | None = None
    """Logical CPUs it is bound to; ``None`` if it may use all."""
    gpu: Gpu | None = None
    """The GPU behind ``device``; ``None`` if unknown, as on other nodes."""


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """Everything decided about a launch before anything starts."""

    request: LaunchRequest
    layout: Layout
    slots_per_node: tuple[int, ...]
    """Number of workers each node could have; the layout may use fewer."""
    domain: str
    """The domain of this node, named by NVML or the scheduler; "" if unknown or not needed."""
    waits_for_domains: bool
    """Whether ``--intra-domain`` can be checked only once all nodes have joined."""
    device: DeviceChoice
    """The device of the mesh; without a mesh, the program chooses."""
    start_method: StartMethod
    start_method_reason: str
    omp_num_threads: int
    """``OMP_NUM_THREADS`` of a rank, if its node has several workers and nobody set it."""
    store_address: str
    """Where the ranks' store listens: loopback, unless another address was requested."""
    store_port: int
    """The store's port; 0 for a free one."""
    shown: frozenset[int] | None
    """Ranks whose output is printed; ``None`` for all."""
    debugged: int | None
    """The rank that gets the terminal, if any."""
    bound_cpus: tuple[tuple[int, ...], ...] | None
    """Logical CPUs of each local rank; ``None`` without ``--numa-binding``."""
    host: HostFacts
    """This machine, with only the accelerators that the launch may use."""
    whole_host: HostFacts
    """This machine, with all its accelerators."""
    rendezvous: RendezvousConfig | None = None
    """Where the nodes meet; ``None`` for a single node."""
    node_rank: int = 0
    roles: tuple[str, ...] = ()
    """The role of each node's workers; empty until all nodes have joined."""

    @property
    def program(self) -> Program:
        """What each rank runs."""
        return self.request.program

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave during the launch."""
        return self.rendezvous is not None and self.rendezvous.is_elastic

    @property
    def spare_workers(self) -> tuple[tuple[int, int], ...]:
        """(node rank, workers without a rank) of each node that has any."""
        counts = zip(self.slots_per_node, self.layout.nproc_per_node, strict=True)
        left = ((node, slots - used) for node, (slots, used) in enumerate(counts))
        return tuple((node, count) for node, count in left if count)

    @property
    def device_type(self) -> str | None:
        """torch device type of the mesh; ``None`` without a mesh, as the program chooses."""
        return self.device.type

    @property
    def uncounted_device(self) -> str | None:
        """The device type that ranks count themselves once torch is imported, if any."""
        return self.device_type if self.device.counted_later else None

    @property
    def modules_of_mesh(self) -> tuple[str, ...]:
        """Modules to import before the mesh is built: they may add its device or backends."""
        may_add = self.device_type not in (None, *COUNTED) or self.request.groups.backends
        return self.request.own_preload if may_add else ()

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
        """Return the index of a rank's device: 0 if the rank sees no other."""
        return 0 if self.request.virtual_local_rank else local_rank

    def place_in_role(self, rank: int) -> tuple[int, int]:
        """Return (rank within its role, number of ranks of that role)."""
        if len(set(self.roles)) < 2:
            return rank, self.layout.world_size
        role = self.roles[self.layout.node_rank(rank)]
        nodes = [node_rank for node_rank, other in enumerate(self.roles) if other == role]
        ranks = sorted(r for node_rank in nodes for r in self.layout.ranks_of_node(node_rank))
        return ranks.index(rank), len(ranks)

    def devices_seen(self, local_rank: int) -> str | None:
        """Return the value of a rank's visible-devices variable, or ``None`` to leave it unset."""
        visible = self.host.visible_devices
        if self.request.virtual_local_rank:
            if visible is None:
                return str(local_rank)
            return visible[local_rank] if visible else ""  # what is hidden stays hidden
        return ",".join(visible or ()) if self.request.gpus else None

    def ranks(self) -> Iterator[RankPlan]:
        """Yield the plan of every rank on every node, in order."""
        return (self.rank(rank) for rank in range(self.layout.world_size))

    @property
    def used_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of this node that its ranks use, or may use if the program chooses."""
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
    """Return the plan of a launch.

    ``check_host`` makes a device that this machine lacks an error, as a dry run may plan for other
    machines. ``nodes_per_domain`` is known once all nodes have joined.

    Raises:
        LayoutError: If mesh, nodes and workers do not fit, with the arithmetic.
        UsageError: If a requested device does not exist here.
        HostError: If this machine refuses to bind processes to CPUs.
    """
    if request.remote is not None:
        facts = replace(facts, gpus=(), links=None)  # ranks run on other machines
    whole_host = facts
    facts = choose_gpus(request.gpus, facts, check_host=check_host)
    nproc = _workers(request, facts)
    domain = facts.domain or ("" if request.domain_size else request.rendezvous.domain)
    is_elsewhere = facts == UNKNOWN_HOST or request.remote is not None
    is_known_later = bool(domain or is_elsewhere or request.rendezvous.step_of)
    is_several = (request.nnodes or 1) > 1
    needs_domains = bool(request.intra_domain and not request.domain_size and is_several)
    waits = needs_domains and is_known_later and not nodes_per_domain  # until nodes tell theirs
    layout = solve_request(
        replace(request, intra_domain=()) if waits else request,
        nnodes=request.nnodes,
        nproc_per_node=nproc,
        nodes_per_domain=nodes_per_domain,
    )
    rendezvous = plan_rendezvous(request.rendezvous, layout.nnodes)
    address, port = LOOPBACK_ADDRESS, 0
    if rendezvous is None:
        address, port = _choose_store(request.rendezvous)
    node_rank = request.rendezvous.node_rank or 0
    uses_rank = port or rendezvous is not None  # without a port, the node rank is ignored
    if uses_rank and node_rank >= layout.nnodes:
        raise UsageError(
            f"--node-rank must be from 0 to {layout.nnodes - 1}, found {node_rank}",
            hint="number nodes from 0, and check --nnodes",
        )
    node_rank = node_rank if rendezvous is not None else 0
    workers = max(1, layout.nproc_per_node[node_rank])
    device = DeviceChoice(None, "chosen by the program")
    if layout.mesh is not None:
        device = _device_of_mesh(request, workers, facts, check_host)
    _check_visible(request, workers, device.type, facts)
    counts = request.nproc_per_node in ("auto", "gpu", "cuda") and facts.accelerator_count > 0
    relies_on_cuda = device.type == "cuda" or (counts and facts.accelerator == "cuda")
    if check_host and relies_on_cuda and not request.virtual_local_rank:
        check_cuda_shows(facts, workers)
    request.groups.check_dims((*layout.dim_labels, *layout.derived_dims))
    start_method, reason = _choose_start_method(request)
    return LaunchPlan(
        request=request,
        layout=layout,
        slots_per_node=count_slots(request.mesh, request.nnodes, nproc),
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
        whole_host=whole_host,
        rendezvous=rendezvous,
        node_rank=node_rank,
    )


def solve_request(
    request: LaunchRequest,
    *,
    nnodes: int | None,
    nproc_per_node: int | Sequence[int] | None,
    nodes_per_domain: Sequence[int],
) -> Layout:
    """Return the layout of a launch on a number of nodes and workers.

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
        renumber=request.place == "auto",
    )


def complete_plan(
    plan: LaunchPlan,
    *,
    node_rank: int,
    nproc_per_node: tuple[int, ...],
    nodes_per_domain: tuple[int, ...] = (),
    roles: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan for the nodes that have joined.

    Raises:
        LayoutError: If the mesh does not fit them.
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
    facts = replace(plan.whole_host, domain="")  # `nodes_per_domain` says more
    completed = build_plan(settled, facts, nodes_per_domain=nodes_per_domain)
    return replace(completed, roles=roles)


def _workers(request: LaunchRequest, facts: HostFacts) -> int | tuple[int, ...] | None:
    """Return the workers of a node, if the request gives them as numbers or by device."""
    nproc = request.nproc_per_node
    if nproc is None:
        if request.is_mesh_inferred and request.device != "cpu" and facts.accelerator_count:
            return facts.accelerator_count
        return None
    if not isinstance(nproc, str):
        return nproc
    kind = "cuda" if nproc == "gpu" else nproc
    if kind == "cpu" or (kind == "auto" and not facts.accelerator_count):
        return facts.usable_cores
    if kind in ("auto", facts.accelerator) and facts.accelerator_count:
        return facts.accelerator_count
    raise UsageError(
        f"--nproc-per-node {nproc}: this machine has no device of type `{kind}`"
        + (f", only `{facts.accelerator}`" if facts.accelerator_count else ""),
        hint="use a number, auto, or cpu for one worker per core",
    )


def _device_of_mesh(
    request: LaunchRequest, workers: int, facts: HostFacts, check_host: bool
) -> DeviceChoice:
    kind, number = facts.accelerator, facts.accelerator_count
    device = choose_device(request.device, workers, kind=kind, count=number, check_host=check_host)
    request.groups.check_backends(device.type)
    if request.gpus is None:
        return device
    check_enough(request.gpus, workers, device)
    return replace(device, reason=f"--gpus names {len(request.gpus)}")


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
    if sys.platform == "darwin":  # as Python's multiprocessing decides
        return "exec", "macOS libraries may start threads, which a fork loses"
    return "fork", "torch is imported once and ranks are forked"


def _choose_store(rendezvous: Rendezvous) -> tuple[str, int]:
    """Return the address and port of the store on one node: torchrun's, but on loopback."""
    host, port = rendezvous.address
    if rendezvous.standalone or rendezvous.backend != STATIC or port is None:
        return rendezvous.local_addr or LOOPBACK_ADDRESS, 0  # as in torchrun, ignore the host
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
    if check_host and not facts.may_bind:
        raise HostError(
            f"--numa-binding {mode}: this machine does not let processes choose their CPUs:"
            " sched_setaffinity(2) is not permitted",
            hint=f"{REFUSED}; or remove --numa-binding",
        )
    try:
        return tuple(
            choose_cpus(mode, topology, local_rank=local_rank, nproc=workers)
            for local_rank in range(workers)
        )
    except UsageError:
        if check_host:
            raise
        return None  # a dry run may plan for other machines


def check_elsewhere(request: LaunchRequest, facts: HostFacts) -> None:
    """Check a launch on other machines, as far as possible without their devices.

    Raises:
        LayoutError: If mesh, nodes and workers do not fit.
        UsageError: If options contradict each other.
    """
    counts = request.nproc_per_node
    is_open = counts is None and request.is_mesh_inferred
    if not isinstance(counts, str) and not is_open:  # else it depends on those machines' devices
        build_plan(request, replace(facts, gpus=()), check_host=False)
