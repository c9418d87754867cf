"""The facts about this machine and its scheduler on which the plan of a request depends."""

from __future__ import annotations

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here, for_caller, is_rank, with_starter
from meshrun.host.detect_host import detect_host
from meshrun.host.machine import HostFacts
from meshrun.plan.device import COUNTED
from meshrun.plan.outside_devices import count_with_torch
from meshrun.plan.rank_program import first_path
from meshrun.plan.request import LaunchRequest


def read_cluster_facts(request: LaunchRequest, *, is_child: bool = False) -> ClusterFacts | None:
    """Return the scheduler's facts; none in a rank, where they describe the launch around it.

    A child is a launcher for whose result a caller of ``launch()`` waits.

    Raises:
        UsageError: If a variable of the scheduler cannot be parsed.
    """
    if is_rank() or request.remote is not None:
        return None
    found = detect_here(collective=request.needs_scheduler)
    if found is None:
        return None
    return for_caller(found) if is_child else with_starter(found)


def read_host_facts(request: LaunchRequest, *, check_host: bool) -> HostFacts:
    """Return the facts that a launch needs, or a dry run, which does not ``check_host``."""
    facts = detect_host(
        with_gpus=not check_host or _depends_on_gpus(request),
        with_topology=request.numa_binding is not None,
        with_links=not check_host,
        with_nics=not check_host or request.nic_affinity,
        with_domain=bool(request.intra_domain),
    )
    if (kind := depends_on_count(request)) is None:
        return facts
    return count_with_torch(facts, kind, request.own_preload, first_path(request.program))


def _depends_on_gpus(request: LaunchRequest) -> bool:
    """Return whether the plan depends on this machine's GPUs; that of a CPU mesh rarely does."""
    if request.mesh is None or request.device != "cpu":
        return True
    is_near = request.numa_binding is not None or bool(request.intra_domain)
    counts = isinstance(request.nproc_per_node, str)
    return is_near or counts or request.gpus is not None or request.virtual_local_rank


def depends_on_count(request: LaunchRequest) -> str | None:
    """Return the device type that only torch can count, if the plan depends on the count.

    ``auto`` is the accelerator that torch finds, if any.
    """
    workers, device = request.nproc_per_node, request.device
    if isinstance(workers, str) and workers not in ("auto", "gpu"):
        return None if workers in COUNTED else workers
    infers = workers == "auto" or (workers is None and request.is_mesh_inferred)
    if request.mesh is not None and device != "auto":
        return device if infers and device not in COUNTED else None
    return "auto" if request.mesh is not None or infers else None
