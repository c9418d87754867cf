"""Problems of a layout that are worth knowing before a launch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from msgspec import Struct

from meshrun.layout import Layout
from meshrun.layout.layout import Between
from meshrun.layout.spec import MeshSpec, format_mesh
from meshrun.plan.group_options import GroupOptions
from meshrun.plan.plan import LaunchPlan
from meshrun.wording import count, listed

_FEW = 4

_CHATTY = (
    "tp", "tensor", "tensor_parallel", "model", "mp", "tp_size",
    "sp", "sequence", "cp", "context", "context_parallel", "ep", "expert", "etp",
)  # fmt: skip
"""Dims that communicate in every layer, the most frequent first: a group should be on one node."""


class Problem(Struct, frozen=True):
    """A problem that will cost time, and how to fix it."""

    problem: str
    fix: str


def find_problems(layout: Layout) -> Iterator[Problem]:
    """Yield problems with the placement of ranks, the worst first.

    If domains are known, groups within one are fast enough.
    """
    if layout.mesh is None or layout.nnodes == 1:
        return
    names = layout.mesh_dim_names or ()
    between: Between = "domains" if layout.nodes_per_domain else "nodes"
    unit = between[:-1]
    room = max(layout.workers(between))
    for name in sorted({*names} & {*_CHATTY}, key=_CHATTY.index):
        crossing, size = layout.count_crossing(name, between), layout.size(name)
        if not crossing:
            continue
        groups = layout.world_size // size
        cross = "crosses" if crossing == 1 else "cross"
        problem = f"{name}: {crossing:,} of {count(groups, 'group')} {cross} {between}"
        if size > room:
            workers = count(room, "worker")
            fix = f"its {size} ranks exceed the {workers} of a {unit}; make {name} smaller"
            yield Problem(problem, fix)
        elif (better := _with_last(layout, name, between)) is not None:
            yield Problem(problem, f"put {name} last: --mesh {better}")
        else:
            fix = f"a {unit}'s {room} workers are not a multiple of {size}; use "
            fix += (
                f"--nproc-per-node {room // size * size}"
                if unit == "node"
                else f"a size of {name} that divides the workers of every domain"
            )
            yield Problem(problem, fix if room % size else f"--intra-{unit} {name} --place auto")


def _with_last(layout: Layout, name: str, between: Between) -> str | None:
    """Return the mesh with a dim moved to the end if its groups then cross nothing."""
    assert layout.mesh is not None  # noqa: S101 - the caller has checked
    pairs = [(dim, size) for dim, size in layout.shape.items() if dim != name]
    pairs.append((name, layout.size(name)))
    mesh = MeshSpec(
        sizes=tuple(size for _, size in pairs), mesh_dim_names=tuple(dim for dim, _ in pairs)
    )
    moved = replace(layout, mesh=mesh, slot_order=None, flattens=(), views=())
    return None if moved.count_crossing(name, between) else format_mesh(mesh)


def describe_domains(layout: Layout) -> str:
    """Return the number and size of domains: ``5 of 18 nodes, 1 of 10 nodes``."""
    runs = [(len([*same]), nodes) for nodes, same in groupby(layout.nodes_per_domain)]
    shown = [f"{domains:,} of {count(nodes, 'node')}" for domains, nodes in runs]
    rest = sum(domains for domains, _ in runs[_FEW:])
    return listed(shown, most=_FEW, rest=f", and {rest:,} more")


def describe_spare_workers(plan: LaunchPlan) -> str:
    """Return how many workers have no rank: ``2 of 8 workers are spare: node 0 has 2``."""
    spares = plan.spare_workers
    total = sum(spare for _, spare in spares)
    rest, verb = len(spares) - 3, "is" if total == 1 else "are"
    more = f", and {count(rest, 'more node')} {'has' if rest == 1 else 'have'} some"
    shown = listed([f"node {node} has {spare}" for node, spare in spares], most=3, rest=more)
    return f"{total:,} of {sum(plan.slots_per_node):,} workers {verb} spare: {shown}"


def communicators(layout: Layout, options: GroupOptions) -> list[str]:
    """Return the groups of each rank, named by their dims, the default group first.

    A dim over all ranks shares the default group, unless it has its own backend or options; a
    view's dim shares the group of another dim with the same ranks.
    """
    if layout.mesh is None:
        return []
    found = ["default"]
    existing = set()
    dims: list[tuple[str, int | str]] = [
        *((label, index) for index, label in enumerate(layout.dim_labels)),
        *((flatten.name, flatten.name) for flatten in layout.flattens),
    ]
    for name, dim in dims:
        if layout.size(dim) < layout.world_size or options.has_own(name):
            found.append(name)
        existing.add(layout.axis(dim).digits)
    for view in layout.views:
        for name in view.mesh.mesh_dim_names or ():
            digits = layout.axis(name).digits
            if digits not in existing or options.has_own(name):
                found.append(name)
                existing.add(digits)
    return found
