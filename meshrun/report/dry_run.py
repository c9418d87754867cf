"""A plan as text: the mesh on its nodes, one row per worker, one row per dim; or a single rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table

from meshrun.errors import MeshrunError
from meshrun.host import rank_variables as var
from meshrun.host.machine import GpuLinks
from meshrun.host.printable import MASK, Mask, is_secret
from meshrun.layout import Layout
from meshrun.layout.derived import shortened_group
from meshrun.layout.layout import Between
from meshrun.plan.plan import LaunchPlan, RankPlan
from meshrun.plan.rank_env import LaunchFacts, rank_environment
from meshrun.plan.rendezvous_options import STATIC
from meshrun.report import findings
from meshrun.report.page import Page, new_table
from meshrun.report.plan_json import rank_to_dict
from meshrun.wording import count, listed, number_ranges

SCHEMA_NAME = "meshrun.rank"
SCHEMA_VERSION = 1
MOST_ROWS = 64
"""A plan of more ranks is summarized unless ``--all`` is given."""
_MAX_COLUMNS = 8
_FEW = 4
_FEW_SIZES = 8
_MAX_PEERS = 8
_CHOSEN_LATER = "(chosen at launch)"


def print_dry_run(plan: LaunchPlan, *, every_row: bool = False) -> None:
    """Print what would be started, without starting it."""
    small = plan.layout.world_size <= MOST_ROWS
    parts: list[RenderableType] = [*_head(plan)]
    if plan.rendezvous is not None and plan.rendezvous.least_nodes is not None:
        parts += ["\nsizes", _sizes(plan, plan.rendezvous.least_nodes, plan.rendezvous.nnodes)]
    if plan.layout.mesh is not None:
        if small and (grid := _grid(plan.layout)) is not None:
            parts += ["\nrank at each coordinate", grid]
        names = findings.communicators(plan.layout, plan.request.groups)
        line = f"communicators per rank: {len(names)} ({', '.join(names)})"
        parts += ["\ndims", _dims(plan.layout), line]
    parts += _devices_here(plan)
    if small:
        headers, *rows = _cells(plan)
        parts += ["\nworkers", new_table(headers, rows, texts=("host", "device"))]
    elif not every_row:
        parts += ["\nnodes", _nodes(plan)]
        parts.append(f"use --all to list all {plan.layout.world_size:,} workers")
    if plan.request.sources:
        parts += ["\noptions", _options(plan)]
    Page().print(Group(*parts))
    if every_row and not small:
        for line in _rows(plan):
            print(line)


def _head(plan: LaunchPlan) -> Iterator[str]:
    layout = plan.layout
    mesh = f"mesh {layout.mesh}" if layout.mesh else "no mesh"
    ranks, nodes = count(layout.world_size, "rank"), count(layout.nnodes, "node")
    yield f"{mesh}: {ranks} on {nodes} {_workers_of_nodes(layout)}"
    if layout.nodes_per_domain:
        yield f"domains: {findings.describe_domains(layout)}"
    elif plan.waits_for_domains:
        here = f" (this one is in {plan.domain})" if plan.domain else ""
        yield f"domains: known once all nodes have joined{here}; --intra-domain is checked then"
    for finding in findings.find_problems(layout):
        yield f"problem: {finding.problem}"
        yield f"         {finding.fix}"
    if plan.spare_workers:
        yield findings.describe_spare_workers(plan)
    if layout.slot_order is not None:
        yield f"placement: ranks fill slots in the order {', '.join(layout.slot_order)}"
        yield "           (code that computes LOCAL_RANK as RANK modulo workers is wrong here)"
    if layout.mesh is not None:
        fastest = layout.dim_labels[-1]
        yield f"fastest dim: {fastest} (consecutive ranks differ in it, as in torch)"
        yield f"device: {plan.device_type} ({plan.device.reason})"
    yield f"start: {plan.start_method} ({plan.start_method_reason})"
    yield f"each rank: {plan.program}"
    if max(layout.nproc_per_node) > 1:
        yield f"           OMP_NUM_THREADS={plan.omp_num_threads} unless already set"


def _workers_of_nodes(layout: Layout) -> str:
    counts = layout.nproc_per_node
    if len({*counts}) == 1:
        return f"x {count(counts[0], 'worker')}"
    few = listed([f"{number:,}" for number in counts], most=_MAX_COLUMNS, rest=", ..")
    return f"with {few} workers"


def _sizes(plan: LaunchPlan, least: int, most: int) -> Table:
    """Return a row for each number of nodes; if there are many, the middle is omitted."""
    table = new_table(("nodes", "ranks", "mesh"), texts=("mesh",), wrapped=("mesh",))
    for number in range(least, most + 1):
        if min(number - least, most - number) < _FEW_SIZES:
            table.add_row(f"{number:,}", *_size(plan, number, least, most))
        elif number == least + _FEW_SIZES:
            table.add_row("..", "..", "..")
    return table


def _size(plan: LaunchPlan, number: int, least: int, most: int) -> tuple[str, str]:
    """Return the ranks and the mesh of an elastic launch on a number of nodes."""
    from meshrun.rendezvous.membership import Membership, fit_nodes  # slow to import
    from meshrun.rendezvous.messages import Join

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
    spare = f", {count(len(choice.spares), 'spare node')}" if choice.spares else ""
    return f"{choice.layout.world_size:,}", f"{choice.layout.mesh or '-'}{spare}"


def _grid(layout: Layout) -> Table | None:
    """Return the mesh with the fastest dim across, or ``None`` if it is too wide to read."""
    columns = layout.sizes[-1]
    if columns > _MAX_COLUMNS:
        return None
    *outer_labels, last = layout.dim_labels
    place, nodes = " ".join(outer_labels), layout.nnodes > 1
    table = new_table((place, *(f"{last}={column}" for column in range(columns))), texts={place})
    for first in range(0, layout.world_size, columns):
        outer = " ".join(str(index) for index in layout.coordinate(first)[:-1])
        ranks = range(first, first + columns)
        cells = (f"{rank} n{layout.node_rank(rank)}" if nodes else str(rank) for rank in ranks)
        table.add_row(outer, *cells)
    return table


def _dims(layout: Layout) -> Table:
    domains = ("cross domains",) if layout.nodes_per_domain else ()
    within = ("within",) if layout.nnodes > 1 else ()
    headers = ("dim", "size", "groups", "cross nodes", *domains, *within, "first groups")
    texts = ("dim", "within", "first groups")
    table = new_table(headers, texts=texts, wrapped=texts)
    dims: list[tuple[str, int | str]] = [
        *((label, index) for index, label in enumerate(layout.dim_labels)),
        *((f"{name} *", name) for name in layout.derived_dims),
    ]
    for label, dim in dims:
        size = layout.size(dim)
        groups = layout.world_size // size
        shown = " ".join(shortened_group(group) for group in islice(layout.groups(dim), 2))
        more = " ..." if groups > 2 else ""
        between: tuple[Between, ...] = ("nodes", "domains") if domains else ("nodes",)
        crosses = (f"{layout.count_crossing(dim, each):,} of {groups:,}" for each in between)
        where = (layout.within(dim) or "-",) if within else ()
        table.add_row(label, f"{size:,}", f"{groups:,}", *crosses, *where, shown + more)
    if layout.derived_dims:
        table.caption = "* derived by " + ", ".join(map(str, [*layout.flattens, *layout.views]))
        table.caption_justify = "left"
        table.caption_style = "none"
    return table


def _devices_here(plan: LaunchPlan) -> Iterator[RenderableType]:
    if any(rank.gpu for rank in plan.ranks_of_node()):
        yield from (f"\ngpus of node {plan.node_rank}", _gpus(plan))
        nics = {rank.gpu.nics for rank in plan.ranks_of_node() if rank.gpu}
        if len(nics) > 1 and not plan.request.nic_affinity:
            yield "--nic-affinity keeps each rank to the network cards nearest its GPU"
    if (links := plan.host.links) is not None and plan.device_type == "cuda":
        yield from ("\nlinks between them", _links(links))
        yield from _weakest_links(plan, links)


def _gpus(plan: LaunchPlan) -> Table:
    """Return the GPU of each rank on this node; those of other nodes are unknown."""
    headers = ("rank", "device", "gpu", "uuid", "numa node", "nearest network card")
    table = new_table(headers, texts=("device", "uuid", "nearest network card"), wrapped=("uuid",))
    for rank in plan.ranks_of_node():
        if (gpu := rank.gpu) is not None:
            numa, nics = "-" if gpu.numa_node is None else str(gpu.numa_node), str(gpu.nics or "-")
            index = gpu.entry if gpu.index is None else str(gpu.index)
            table.add_row(str(rank.rank), rank.device, index, gpu.uuid or "-", numa, nics)
    return table


def _links(links: GpuLinks) -> Table:
    """Return the link between each pair of GPUs, as ``nvidia-smi topo -m`` names it."""
    rows = ((str(gpu), *pairs) for gpu, pairs in enumerate(links.pairs))
    return new_table(("cuda", *map(str, range(len(links.pairs)))), rows)


def _weakest_links(plan: LaunchPlan, links: GpuLinks) -> Iterator[str]:
    """Yield the slowest link that the groups of each dim use on this node."""
    layout = plan.layout
    here = set(layout.ranks_of_node(plan.node_rank))
    for index, label in enumerate(layout.dim_labels):
        groups = {tuple(layout.group(index, rank)) for rank in here}
        inside = [[layout.local_rank(rank) for rank in group if rank in here] for group in groups]
        found = {links.weakest(devices): devices for devices in inside if len(devices) > 1}
        if weakest := links.weakest_of([link for link in found if link is not None]):
            devices = " ".join(map(str, sorted(found[weakest])))
            yield f"{label}: slowest link on this node {weakest}, between gpus {devices}"


def _options(plan: LaunchPlan) -> Table:
    """Return the options that were given, and whether on the command line or in a variable."""
    table = new_table()
    for header in ("option", "value", "from"):
        table.add_column(header, overflow="fold")
    for option, value, source in plan.request.sources:
        table.add_row(option, value, source)
    return table


def _nodes(plan: LaunchPlan) -> Table:
    """Return a row for each of the first nodes and for the last one."""
    layout, hosts = plan.layout, plan.request.hosts
    headers = ("node", *_host("host", hosts), "ranks", "first coordinate", "last coordinate")
    table = new_table(headers, texts=("host",))
    shown: Sequence[int | None] = range(layout.nnodes)
    if len(shown) > _FEW + 1:
        shown = [*range(_FEW), None, layout.nnodes - 1]
    for node in shown:
        if node is None:
            table.add_row("...", *_host("...", hosts), "...", "...", "...")
            continue
        name = _host(hosts[node] if hosts else "", hosts)
        ranks = layout.ranks_of_node(node)
        if not ranks:
            table.add_row(str(node), *name, "none", "", "")
            continue
        ends = (
            f"({','.join(map(str, layout.coordinate(rank)))})" if layout.mesh else ""
            for rank in (ranks[0], ranks[-1])
        )
        span = f"{ranks[0]}-{ranks[-1]}" if isinstance(ranks, range) else shortened_group(ranks)
        table.add_row(str(node), *name, span, *ends)
    return table


def _host(text: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the cell of the column for hosts, which exists only if hosts are known."""
    return (text,) if hosts else ()


def _columns(plan: LaunchPlan) -> Iterator[tuple[str, Callable[[RankPlan], object]]]:
    """Yield the header of each column, and what it shows of a rank."""
    layout, hosts = plan.layout, plan.request.hosts
    yield "rank", attrgetter("rank")
    if layout.nodes_per_domain:
        yield "domain", lambda rank: layout.domain(rank.rank)
    yield "node", attrgetter("node_rank")
    if hosts:
        yield "host", lambda rank: hosts[rank.node_rank]
    yield "local rank", attrgetter("local_rank")
    if plan.device_type:
        yield "device", attrgetter("device")
    if plan.bound_cpus:
        yield "cpus", lambda rank: number_ranges(rank.cpus or ())
    for place, label in enumerate(layout.dim_labels):
        yield label, lambda rank, place=place: rank.coordinate[place]  # type: ignore[misc]


def _cells(plan: LaunchPlan) -> Iterator[list[str]]:
    """Yield the headers, and then the cells of each worker."""
    headers, values = zip(*_columns(plan), strict=True)
    yield list(headers)
    for rank in plan.ranks():
        yield [str(value(rank)) for value in values]


def _rows(plan: LaunchPlan) -> Iterator[str]:
    """Yield every worker in plain columns, a hundred times faster than in a rich table."""
    widths: list[int] = []
    for cells in _cells(plan):
        widths = widths or [max(len(header), 8) for header in cells]
        yield " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


# ---- one rank ------------------------------------------------------------------------------


def environment_of(plan: LaunchPlan, rank: RankPlan) -> dict[str, str]:
    """Return the variables that a rank has in addition to the launcher's, with masked secrets."""
    rendezvous = plan.rendezvous
    port = plan.store_port
    if rendezvous is not None and rendezvous.backend == STATIC:
        port = rendezvous.port or 0
    facts = LaunchFacts(
        run_id=plan.request.rendezvous.run_id or _CHOSEN_LATER,
        master_addr=plan.store_address if rendezvous is None else rendezvous.host or _CHOSEN_LATER,
        master_port=port,
        interface="lo" if rendezvous is None else None,
    )
    found = rank_environment(plan, rank, facts, os.environ, error_file=_CHOSEN_LATER)
    if not port:
        found[var.MASTER_PORT] = _CHOSEN_LATER
    mask = Mask(os.environ)
    return {
        name: MASK if is_secret(name) else mask.text(value) for name, value in sorted(found.items())
    }


def print_rank(plan: LaunchPlan, rank: int) -> None:
    """Print everything about one rank."""
    out = Page()
    shown = plan.rank(rank)
    for line in _rank_head(plan, shown):
        out.print(line)
    if plan.layout.mesh is not None:
        out.print("\npeers")
        out.print(_peers(plan.layout, rank))
    out.print("\nenvironment, in addition to the launcher's")
    for name, value in environment_of(plan, shown).items():
        out.print(f"{name}={value}", soft_wrap=True)


def render_rank_json(plan: LaunchPlan, rank: int) -> str:
    """Return everything about one rank as a JSON object."""
    layout, shown = plan.layout, plan.rank(rank)
    dims = [*layout.shape, *layout.derived_dims] if layout.mesh else []
    return json.dumps(
        {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            **rank_to_dict(shown),
            "peers": {
                dim: {"dim_rank": layout.dim_rank(dim, rank), "group": [*layout.group(dim, rank)]}
                for dim in dims
            },
            "environment": environment_of(plan, shown),
        },
        indent=2,
    )


def _rank_head(plan: LaunchPlan, rank: RankPlan) -> Iterator[str]:
    layout = plan.layout
    mesh = f" of mesh {layout.mesh}" if layout.mesh else ""
    yield f"rank {rank.rank} of {layout.world_size:,}{mesh}"
    host = f" ({plan.request.hosts[rank.node_rank]})" if plan.request.hosts else ""
    yield f"node {rank.node_rank} of {layout.nnodes:,}{host}, local rank {rank.local_rank}"
    if layout.nodes_per_domain:
        yield f"domain {layout.domain(rank.rank)} of {len(layout.nodes_per_domain):,}"
    if rank.coordinate:
        places = zip(layout.dim_labels, rank.coordinate, strict=True)
        yield "coordinate: " + ", ".join(f"{dim}={place}" for dim, place in places)
    if rank.device is not None:
        yield f"device: {rank.device} ({plan.device.reason})"
    if (gpu := rank.gpu) is not None:
        numa = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
        nics = f", nearest network card {gpu.nics}" if gpu.nics else ""
        index = gpu.entry if gpu.index is None else gpu.index
        yield f"gpu: {index} {gpu.uuid}{numa}{nics}"
    if rank.cpus:
        yield f"cpus: {number_ranges(rank.cpus)}"
    yield f"runs: {plan.program.for_local_rank(rank.local_rank)}"


def _peers(layout: Layout, rank: int) -> Table:
    texts = ("dim", "ranks in its group")
    headers = ("dim", "place", "before", "after", "nodes", "ranks in its group")
    table = new_table(headers, texts=texts, wrapped=texts)
    labels = dict(zip(layout.shape, layout.dim_labels, strict=True))
    for dim in [*layout.shape, *layout.derived_dims]:
        group = layout.group(dim, rank)
        before, after = (layout.neighbor(dim, step, rank) for step in (-1, +1))
        table.add_row(
            labels.get(dim, dim),
            f"{layout.dim_rank(dim, rank)} of {len(group)}",
            *("-" if other is None else str(other) for other in (before, after)),
            str(len({layout.node_rank(other) for other in group})),
            " ".join(map(str, group[:_MAX_PEERS])) + (" .." if len(group) > _MAX_PEERS else ""),
        )
    return table
