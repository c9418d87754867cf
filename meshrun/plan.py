"""A launch as a value: who runs where, with which device, arguments and environment.

``build_plan`` turns a request and the facts of this machine into a LaunchPlan; a dry run prints
that very object and a launch executes it. Nothing here touches a process, a socket or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshrun.errors import LayoutError, UsageError
from meshrun.layout import Layout, solve_layout
from meshrun.spec import INFERRED, MeshSpec

ProgramKind = Literal["script", "module"]
StartMethod = Literal["fork", "exec"]


_TOO_FEW = " found, too few"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What each rank runs: a script by path or a module by name, and its arguments."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The words after ``python`` that would run the same program once."""
        flag = ("-m",) if self.kind == "module" else ()
        return (*flag, self.target, *self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What this machine is, as far as a plan needs to know."""

    hostname: str
    usable_cores: int
    """Cores this process may use, by affinity and cgroup quota; at least 1."""
    accelerator: str | None
    """torch device type of the accelerator torch was built for, such as ``cuda``, or ``None``."""
    accelerator_count: int
    """Accelerators visible to this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What the user asked for; ``None`` means "not given"."""

    program: Program
    mesh: MeshSpec | None = None
    nnodes: int | None = None
    nproc_per_node: int | None = None
    device: str = "auto"
    start_method: StartMethod | None = None
    shutdown_timeout_s: float = 30.0
    prefix: bool = True
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: its numbers, its coordinate and its device."""

    rank: int
    node_rank: int
    local_rank: int
    coordinate: tuple[int, ...]
    device: str | None
    """torch device such as ``cuda:3`` or ``cpu``; ``None`` where the program chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything decided about a launch before anything is started."""

    layout: Layout
    program: Program
    device_type: str | None
    """torch device type of the mesh; ``None`` without a mesh, where the program chooses."""
    device_reason: str
    """Why that device: one phrase for people."""
    start_method: StartMethod
    start_method_reason: str
    omp_num_threads: int
    """Threads a rank's OpenMP may use, unless ``OMP_NUM_THREADS`` is set already."""
    shutdown_timeout_s: float
    prefix: bool
    preload: tuple[str, ...]
    node_rank: int = 0

    @property
    def passes_over_accelerators(self) -> bool:
        """Whether there are accelerators, too few of them, and so the mesh is on the CPU."""
        return self.device_reason.endswith(_TOO_FEW)

    def rank(self, rank: int) -> RankPlan:
        """Return the plan of one rank."""
        local_rank = self.layout.local_rank(rank)
        return RankPlan(
            rank=rank,
            node_rank=self.layout.node_rank(rank),
            local_rank=local_rank,
            coordinate=self.layout.coordinate(rank),
            device=device_name(self.device_type, local_rank),
        )

    def ranks(self) -> Iterator[RankPlan]:
        """Yield the plan of every rank on every node, in order."""
        return (self.rank(rank) for rank in range(self.layout.world_size))

    def ranks_of_node(self) -> Iterator[RankPlan]:
        """Yield the plans of the ranks that this node starts."""
        return (self.rank(rank) for rank in self.layout.ranks_of_node(self.node_rank))


def device_name(device_type: str | None, local_rank: int) -> str | None:
    """Return the torch device of a local rank: ``cuda:3``, ``cpu``, or ``None`` if undecided."""
    if device_type is None or device_type == "cpu":
        return device_type
    return f"{device_type}:{local_rank}"


def build_plan(request: LaunchRequest, facts: HostFacts, *, check_host: bool = True) -> LaunchPlan:
    """Decide everything about a launch.

    Args:
        request: What the user asked for.
        facts: This machine.
        check_host: Whether a device this machine lacks is an error; a dry run may plan for
            machines that are not here.

    Raises:
        LayoutError: If mesh, nodes and workers do not fit, with the arithmetic.
        UsageError: If a device was asked for that is not here.
    """
    nproc_per_node = request.nproc_per_node
    if nproc_per_node is None:
        nproc_per_node = _workers_from_devices(request, facts)
    layout = solve_layout(request.mesh, nnodes=request.nnodes, nproc_per_node=nproc_per_node)
    workers = layout.nproc_per_node[0]
    device_type, device_reason = (None, "the program chooses")
    if layout.mesh is not None:
        device_type, device_reason = _choose_device(request.device, workers, facts, check_host)
    start_method: StartMethod = request.start_method or "fork"
    reason = "asked for" if request.start_method else "torch is imported once and ranks are forked"
    return LaunchPlan(
        layout=layout,
        program=request.program,
        device_type=device_type,
        device_reason=device_reason,
        start_method=start_method,
        start_method_reason=reason,
        omp_num_threads=max(1, facts.usable_cores // workers),
        shutdown_timeout_s=request.shutdown_timeout_s,
        prefix=request.prefix,
        preload=request.preload,
    )


def _workers_from_devices(request: LaunchRequest, facts: HostFacts) -> int | None:
    """A ``-1`` without a worker count means one worker an accelerator, where there are any."""
    inferred = request.mesh is not None and INFERRED in request.mesh.sizes
    if inferred and request.device != "cpu" and facts.accelerator_count:
        return facts.accelerator_count
    return None


def _choose_device(asked: str, workers: int, facts: HostFacts, check_host: bool) -> tuple[str, str]:
    count, kind = facts.accelerator_count, facts.accelerator
    if asked == "cpu":
        return "cpu", "asked for"
    if asked == "auto":
        if kind is None or count == 0:
            return "cpu", "no accelerator found"
        if count < workers:
            return "cpu", f"{workers} workers, and {count} {kind}{_TOO_FEW}"
        return kind, f"{count} found"
    if not asked.isalpha():
        hint = "each rank takes the device of its local rank; choose among them with the"
        raise UsageError(
            f"--device takes a device type such as `cuda`, found `{asked}`",
            hint=f"{hint} visibility variable, such as CUDA_VISIBLE_DEVICES",
        )
    if not check_host:
        return asked, "asked for, and not checked in a dry run"
    if kind is not None and asked != kind:
        raise UsageError(
            f"--device {asked} was asked for, and torch here is built for {kind}",
            hint=f"--device {kind}, or --device cpu",
        )
    if count < workers:
        raise LayoutError(
            f"{workers} workers need {workers} {asked} devices, and this machine has"
            f" {count or 'none'}",
            hint=_device_hint(count, workers),
        )
    return asked, "asked for"


def _device_hint(count: int, workers: int) -> str:
    if count == 0:
        return "--device cpu runs the same mesh over gloo"
    nodes = math.ceil(workers / count)
    return f"use at most {count} workers a node (--nnodes {nodes}?), or --device cpu"
