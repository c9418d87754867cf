"""The sizes that an elastic launch may take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace
from rich.table import Table

from meshrun.errors import MeshrunError
from meshrun.plan.plan import LaunchPlan
from meshrun.rendezvous.membership import Membership, fit_nodes
from meshrun.rendezvous.messages import Join
from meshrun.report.page import new_table
from meshrun.wording import count

_FEW = 8


def sizes_table(plan: LaunchPlan, *, least: int, most: int) -> Table:
    """Return a row for each number of nodes; if there are many, the middle is omitted."""
    table = new_table(("nodes", "ranks", "mesh"), texts=("mesh",), wrapped=("mesh",))
    for row in _rows(plan, least, most):
        table.add_row(*row)
    return table


def _rows(plan: LaunchPlan, least: int, most: int) -> Iterator[tuple[str, str, str]]:
    numbers = range(least, most + 1)
    shown = [number for number in numbers if min(number - least, most - number) < _FEW]
    before = least - 1
    for number in shown:
        if number != before + 1:
            yield "..", "..", ".."
        before = number
        yield f"{number:,}", *_size(plan, number, least, most)


def _size(plan: LaunchPlan, number: int, least: int, most: int) -> tuple[str, str]:
    request = plan.request
    if plan.waits_for_domains:
        request = replace(request, intra_domain=())
    nodes = Membership(
        fit=partial(fit_nodes, request),
        least=least,
        most=most,
        infos={
            node: Join(host="", node_rank=None, nproc=workers, settings={})
            for node, workers in enumerate(plan.slots_per_node[:number])
        },
    )
    try:
        choice = nodes.choose()
    except MeshrunError:
        return "-", "no mesh fits: the nodes wait for more"
    mesh = str(choice.layout.mesh) if choice.layout.mesh else "-"
    spares = len(choice.spares)
    spare = f", {count(spares, 'spare node')}" if spares else ""
    return f"{choice.layout.world_size:,}", mesh + spare
