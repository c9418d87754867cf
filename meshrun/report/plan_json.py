"""A plan as JSON for programs; docs/reference/plan-json.md describes the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product, repeat
from typing import Any

from meshrun.host.machine import Gpu
from meshrun.layout import Layout
from meshrun.plan.plan import LaunchPlan, RankPlan
from meshrun.plan.rank_env import nic_variables
from meshrun.protocol.packing import to_builtins
from meshrun.report.findings import communicators, find_problems

SCHEMA_NAME = "meshrun.plan"
SCHEMA_VERSION = 1


def render_plan_json(plan: LaunchPlan) -> str:
    """Return the plan as one JSON object with a line per rank, for people and ``grep``."""
    head = json.dumps({"schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION}, **_head(plan)})
    lines = ",\n  ".join(_lines(plan))
    return f'{head[:-1]}, "ranks": [\n  {lines}\n]}}'


def _lines(plan: LaunchPlan) -> Iterator[str]:
    """Yield the object of each rank.

    Ranks with the same local rank differ only in a few numbers, except on this machine, whose GPUs
    are known. Encoding each rank separately would take five times as long.
    """
    layout = plan.layout
    dims = [tuple(map(str, range(size))) for size in layout.sizes]
    coordinates = product(*dims) if layout.mesh else repeat((), layout.world_size)
    places = zip(map(layout.slot, range(layout.world_size)), coordinates, strict=True)
    encoded: dict[tuple[bool, int], tuple[str, str]] = {}
    for rank, ((node_rank, local_rank), place) in enumerate(places):
        key = node_rank == plan.node_rank, local_rank
        start, coordinate = f'{{"rank": {rank}, "node_rank": {node_rank}', f"[{', '.join(place)}]"
        if key not in encoded:
            whole = json.dumps(rank_to_dict(plan.rank(rank))).removeprefix(start)
            before, _, after = whole.partition(coordinate)
            encoded[key] = before, after
        before, after = encoded[key]
        yield f"{start}{before}{coordinate}{after}"


def rank_to_dict(rank: RankPlan) -> dict[str, Any]:
    """Return the place of a rank and its devices."""
    return {
        "rank": rank.rank,
        "node_rank": rank.node_rank,
        "local_rank": rank.local_rank,
        "device": rank.device,
        "coordinate": rank.coordinate,
        "cpus": rank.cpus or None,
        "gpu": _gpu_to_dict(rank.gpu) if rank.gpu else None,
    }


def _gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid or None,
        "model": gpu.model or None,
        "pci_address": gpu.address,
        "numa_node": gpu.numa_node,
        "nics": list(gpu.nics.names) if gpu.nics else [],
        "nic_nearness": gpu.nics.nearness if gpu.nics else None,
        "nic_variables": nic_variables(gpu, None, ()),
    }


def _head(plan: LaunchPlan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "program": {
            "kind": plan.program.kind,
            "target": plan.program.target,
            "args": list(plan.program.args),
        },
        "mesh": str(layout.mesh) if layout.mesh else None,
        "mesh_shape": list(layout.sizes) if layout.mesh else None,
        "mesh_dim_names": list(layout.mesh_dim_names) if layout.mesh_dim_names else None,
        "world_size": layout.world_size,
        "nnodes": layout.nnodes,
        "hosts": list(plan.request.hosts),
        "nproc_per_node": list(layout.nproc_per_node),
        "slots_per_node": list(plan.slots_per_node),
        "nodes_per_domain": list(layout.nodes_per_domain) or None,
        "slot_order": list(layout.slot_order) if layout.slot_order else None,
        "flatten": [str(flatten) for flatten in layout.flattens],
        "views": [str(view) for view in layout.views],
        "communicators": communicators(layout, plan.request.groups),
        "problems": to_builtins([*find_problems(layout)]),
        "device_type": plan.device_type,
        "device_reason": plan.device.reason,
        "gpu_links": [list(pairs) for pairs in plan.host.links.pairs] if plan.host.links else None,
        "start_method": plan.start_method,
        "omp_num_threads": plan.omp_num_threads,
        "shutdown_timeout_s": plan.request.shutdown_timeout_s,
        "max_restarts": plan.request.max_restarts,
        "options": [
            {"option": option, "value": value, "from": source}
            for option, value, source in plan.request.sources
        ],
        "dims": [_dim(layout, dim) for dim in range(len(layout.sizes))],
        "derived_dims": [
            {"name": dim, "size": layout.size(dim), **_groups(layout, dim)}
            for dim in layout.derived_dims
        ],
    }


def _dim(layout: Layout, dim: int) -> dict[str, Any]:
    size = layout.sizes[dim]
    return {
        "name": layout.mesh_dim_names[dim] if layout.mesh_dim_names else None,
        "size": size,
        "stride": layout.group(dim, 0).step if size > 1 else 1,
        **_groups(layout, dim),
    }


def _groups(layout: Layout, dim: int | str) -> dict[str, Any]:
    return {
        "groups": layout.world_size // layout.size(dim),
        "groups_crossing_nodes": layout.count_crossing(dim),
        "groups_crossing_domains": layout.count_crossing(dim, "domains")
        if layout.nodes_per_domain
        else None,
        "rail_aligned": layout.rail_aligned(dim),
        "within": layout.within(dim),
    }
