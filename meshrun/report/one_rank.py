"""One rank of a plan: its place, its peers in each dim, its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from rich.table import Table

from meshrun.host import rank_variables as var
from meshrun.host.printable import MASK, Mask, is_secret
from meshrun.layout import Layout
from meshrun.plan.plan import LaunchPlan, RankPlan
from meshrun.plan.rank_env import LaunchFacts, rank_environment
from meshrun.plan.rendezvous_options import STATIC
from meshrun.report.page import Page, new_table
from meshrun.report.plan_json import rank_to_dict
from meshrun.wording import number_ranges

SCHEMA_NAME = "meshrun.rank"
SCHEMA_VERSION = 1
_MAX_PEERS = 8
_CHOSEN_LATER = "(chosen at launch)"


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
    for line in _head(plan, shown):
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


def _head(plan: LaunchPlan, rank: RankPlan) -> Iterator[str]:
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
