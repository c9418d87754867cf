"""Which groups cross nodes, and the tracks on which their lines run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshrun.layout import Layout
from meshrun.report.svg_style import shorten
from meshrun.wording import count, plural


@dataclass(frozen=True, slots=True)
class DimSummary:
    """What a legend says of a dim."""

    dim: int
    label: str
    size: int
    groups: int
    crossing: int
    """Groups with ranks on more than one node."""

    def __str__(self) -> str:
        few = "" if self.size > 1 else " (of one rank)"
        groups = count(self.groups, "group")
        return f"{self.label}: {self.crossing:,} of {groups} cross nodes{few}"


@dataclass(frozen=True, slots=True)
class Line:
    """A group, or several groups that join the same places, on a track of its own.

    Args:
        stops: What it joins, in order: ranks, or nodes.
        track: Place among the lines of the dim; lines on one track do not meet.
        crosses: Whether it joins nodes.
        groups: How many groups it stands for.
    """

    stops: tuple[int, ...]
    track: int
    crosses: bool
    groups: int = 1


def summarize(layout: Layout) -> list[DimSummary]:
    """Return a summary of each dim, slowest first."""
    return [
        DimSummary(dim, label, size, layout.world_size // size, layout.count_crossing(dim))
        for dim, (label, size) in enumerate(zip(layout.dim_labels, layout.sizes, strict=True))
    ]


def lines_of_ranks(layout: Layout, dim: int, ranks: Sequence[int]) -> list[Line]:
    """Return a line for each group of ``dim`` whose ranks all are in ``ranks``, in their order."""
    place = {rank: at for at, rank in enumerate(ranks)}
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(layout.source(dim, rank), []).append(rank)
    size = layout.size(dim)
    whole = [group for group in groups.values() if len(group) == size > 1]
    tracks = _tracks([(place[group[0]], place[group[-1]]) for group in whole])
    return [
        Line(tuple(group), track, layout.crosses_nodes(group))
        for group, track in zip(whole, tracks, strict=True)
    ]


def lines_of_nodes(layout: Layout, dim: int) -> list[Line]:
    """Return a line for each set of nodes that groups of ``dim`` join."""
    counts: Counter[tuple[int, ...]] = Counter()
    for group in layout.groups(dim):
        nodes = tuple(sorted({layout.node_rank(rank) for rank in group}))
        if len(nodes) > 1:
            counts[nodes] += 1
    joined = sorted(counts)
    tracks = _tracks([(nodes[0], nodes[-1]) for nodes in joined])
    return [
        Line(nodes, track, crosses=True, groups=counts[nodes])
        for nodes, track in zip(joined, tracks, strict=True)
    ]


def bundle_heads(layout: Layout, dim: int, lines: Sequence[Line]) -> tuple[str, str]:
    """Return what stands above a dim's bundles: its name, and how many groups each line is."""
    counts = sorted({line.groups for line in lines})
    shown = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return shorten(layout.dim_labels[dim]), f"{shown} group{plural(counts[-1])} each"


def track_count(lines: Iterable[Line]) -> int:
    """Return how many tracks the lines take."""
    return max((line.track + 1 for line in lines), default=0)


def _tracks(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Give each span, in order of its start, the first track that is free there."""
    ends: list[int] = []
    tracks = []
    for first, last in spans:
        free = next((track for track, end in enumerate(ends) if end < first), len(ends))
        ends[free:] = [last, *ends[free + 1 :]]
        tracks.append(free)
    return tracks
