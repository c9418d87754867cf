"""Inspection of this machine, as far as a request needs it."""

from __future__ import annotations

from dataclasses import replace

from meshrun.cluster import ClusterFacts
from meshrun.host.cores import count_cores
from meshrun.host.detect_host import detect_host
from meshrun.host.machine import HostFacts
from meshrun.host.outside_devices import count_with_torch
from meshrun.plan.nic_affinity import note_no_nics
from meshrun.plan.plan import LaunchPlan, depends_on_count
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import note_few_cores


def look_at_host(request: LaunchRequest, *, with_links: bool) -> HostFacts:
    """Return the facts that a plan depends on.

    Args:
        request: The request to plan.
        with_links: Whether the plan shows the links between GPUs and to network cards.
    """
    return detect_host(
        with_topology=request.numa_binding is not None,
        with_links=with_links,
        with_nics=with_links or request.nic_affinity,
        with_domain=bool(request.intra_domain),
    )


def count_devices(request: LaunchRequest, facts: HostFacts) -> HostFacts:
    """Return the facts with the devices that only torch can count, if the plan depends on it."""
    kind = depends_on_count(request)
    return facts if kind is None else count_with_torch(facts, kind, request.own_preload)


def note_limits(plan: LaunchPlan, cluster: ClusterFacts | None) -> LaunchPlan:
    """Return the plan with notes about too few cores or missing network cards."""
    workers = plan.layout.nproc_per_node[plan.node_rank]
    bound, cores = count_cores()
    request = note_few_cores(plan.request, cluster, workers=workers, bound=bound, cores=cores)
    return replace(plan, request=replace(request, notes=(*request.notes, *note_no_nics(plan))))
