"""The positions of nodes, ranks and the lines of groups in an SVG. Pure arithmetic.

Three arrangements, by how much there is to draw: few ranks stand in one line with every group
below them; more ranks stand a node a row, with groups that cross nodes beside the rows; many
stand in a grid of nodes, where single lines could not be followed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshrun.layout import Layout
from meshrun.report.svg_style import coordinate_text, node_label, shorten, width_of
from meshrun.wording import count, plural

MARGIN = 16.0
TRACK = 9.0
"""From one line of a lane to the next."""
BUNDLE_TRACK = 14.0
BUNDLE_HEAD = 34.0
_PAD = 8.0
_GAP = 4.0
_LABEL = 20.0
"""What the name of a node takes above its cells."""
_IN_LINE = 16
_IN_ROWS = 16
_DETAILED = 128
MOST_RANKS = 4096
"""Of more ranks the first nodes and the last are drawn."""
_FEW_RANKS = 512
_ASPECT = 1.5

Arrangement = Literal["line", "rows", "grid"]


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


@dataclass(frozen=True, slots=True)
class Box:
    """A node: where it is, and the ranks that are drawn in it."""

    node: int
    x: float
    y: float
    width: float
    height: float
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Lane:
    """Tracks side by side for the lines of a dim; ``start`` is where the first one is."""

    dim: int
    lines: tuple[Line, ...]
    start: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Everything that has a place."""

    arrangement: Arrangement
    detailed: bool
    """Whether cells have room for coordinates."""
    cell_width: float
    cell_height: float
    boxes: tuple[Box, ...]
    corners: dict[int, tuple[float, float]]
    """Upper left corner of the cell of each rank that is drawn."""
    lanes: tuple[Lane, ...] = ()
    """Lines between ranks: below the line of nodes, or below the cells of each row."""
    bundles: tuple[Lane, ...] = ()
    """Lines between nodes, beside the rows."""
    right: float
    bottom: float
    gap: tuple[float, float] | None = None
    """Middle of the place in the grid that stands for the nodes left out."""

    def middle(self, rank: int) -> float:
        """Return the x in the middle of a rank's cell."""
        return self.corners[rank][0] + self.cell_width / 2


def arrange(layout: Layout, top: float) -> Sheet:
    """Give everything a place below ``top``."""
    if layout.world_size <= _IN_LINE:
        return _in_line(layout, top)
    if layout.nnodes <= _IN_ROWS and max(layout.nproc_per_node) <= _IN_ROWS:
        return _in_rows(layout, top)
    return _in_grid(layout, top)


# ---- cells ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cells:
    """The size of cells, and where they were put."""

    detailed: bool
    width: float
    height: float
    corners: dict[int, tuple[float, float]] = field(default_factory=dict)

    def put(self, ranks: Sequence[int], x: float, y: float, per_row: int) -> None:
        for place, rank in enumerate(ranks):
            row, column = divmod(place, per_row)
            self.corners[rank] = (
                x + column * (self.width + _GAP),
                y + row * (self.height + _GAP),
            )

    def extent(self, count: int, per_row: int) -> tuple[float, float]:
        columns = max(1, min(count, per_row))  # a node of spares alone has room for one
        rows = max(1, math.ceil(count / max(1, per_row)))
        return columns * (self.width + _GAP) - _GAP, rows * (self.height + _GAP) - _GAP


def _cells(layout: Layout) -> _Cells:
    last = layout.world_size - 1
    if layout.world_size > _DETAILED:
        return _Cells(False, max(20.0, width_of(str(last), 9) + 5), 16.0)
    widest = width_of(coordinate_text(tuple(size - 1 for size in layout.sizes)), 9)
    height = 36.0 if layout.sizes else 30.0
    return _Cells(True, max(36.0, width_of(str(last), 13) + 10, widest + 8), height)


# ---- a line of nodes -----------------------------------------------------------------------


def _in_line(layout: Layout, top: float) -> Sheet:
    cells = _cells(layout)
    in_slots = [layout.rank_in_slot(slot) for slot in range(layout.world_size)]
    found = [(dim, lines_of_ranks(layout, dim, in_slots)) for dim in range(len(layout.sizes))]
    x = MARGIN + _lane_label_width(layout, [dim for dim, lines in found if lines])
    boxes = []
    for node in range(layout.nnodes):
        ranks = layout.ranks_of_node(node)
        inner, height = cells.extent(len(ranks), len(ranks))
        width = max(inner, width_of(node_label(node), 11)) + 2 * _PAD
        boxes.append(Box(node, x, top, width, _LABEL + height + _PAD, ranks))
        cells.put(ranks, x + (width - inner) / 2, top + _LABEL, len(ranks))
        x += width + 2 * _PAD
    lanes, bottom = _stack_lanes(found, boxes[0].y + boxes[0].height + 8)
    return Sheet(
        arrangement="line",
        detailed=True,
        cell_width=cells.width,
        cell_height=cells.height,
        boxes=tuple(boxes),
        corners=cells.corners,
        lanes=lanes,
        right=x - 2 * _PAD,
        bottom=bottom,
    )


def _lane_label_width(layout: Layout, dims: Sequence[int]) -> float:
    labels = [shorten(layout.dim_labels[dim]) for dim in dims]
    return max((width_of(label, 12) + 10 for label in labels), default=0.0)


def _stack_lanes(
    found: Sequence[tuple[int, Sequence[Line]]], y: float
) -> tuple[tuple[Lane, ...], float]:
    """Put the lanes below each other, the fastest dim first, as it is nearest to the ranks."""
    lanes = []
    for dim, lines in reversed(found):
        if lines:
            lanes.append(Lane(dim, tuple(lines), y + 10))
            y += 10 + (track_count(lines) - 1) * TRACK + 8
    return tuple(lanes), y


# ---- a row a node --------------------------------------------------------------------------


def _in_rows(layout: Layout, top: float) -> Sheet:
    cells = _cells(layout)
    dims = range(len(layout.sizes))
    nodes = [layout.ranks_of_node(node) for node in range(layout.nnodes)]
    found = [
        (dim, [line for ranks in nodes for line in lines_of_ranks(layout, dim, ranks)])
        for dim in dims
    ]
    bundles = [(dim, lines) for dim in dims if (lines := lines_of_nodes(layout, dim))]
    names = width_of(node_label(layout.nnodes - 1), 11) + 12
    left = MARGIN + _PAD
    cells_at = left + max(names, _lane_label_width(layout, [dim for dim, lines in found if lines]))
    inner, height = cells.extent(max(layout.nproc_per_node), _IN_ROWS)
    lanes, box_height = _stack_lanes(found, _PAD + height)
    box_height += 3 if lanes else _PAD
    y = top + (BUNDLE_HEAD if bundles else 0)
    boxes = []
    for node, ranks in enumerate(nodes):
        boxes.append(Box(node, MARGIN, y, cells_at + inner + _PAD - MARGIN, box_height, ranks))
        cells.put(ranks, cells_at, y + _PAD, _IN_ROWS)
        y += box_height + _PAD
    placed, right = _place_bundles(layout, bundles, MARGIN + boxes[0].width)
    return Sheet(
        arrangement="rows",
        detailed=cells.detailed,
        cell_width=cells.width,
        cell_height=cells.height,
        boxes=tuple(boxes),
        corners=cells.corners,
        lanes=lanes,
        bundles=placed,
        right=right,
        bottom=y - _PAD,
    )


def _place_bundles(
    layout: Layout, bundles: Sequence[tuple[int, list[Line]]], right: float
) -> tuple[tuple[Lane, ...], float]:
    placed = []
    x = right
    for dim, lines in reversed(bundles):
        name, count = bundle_heads(layout, dim, lines)
        x += 24
        placed.append(Lane(dim, tuple(lines), x))
        tracks = (track_count(lines) - 1) * BUNDLE_TRACK
        x += max(width_of(name, 12), width_of(count, 11), tracks)
    return tuple(placed), x


# ---- a grid of nodes -----------------------------------------------------------------------


def _in_grid(layout: Layout, top: float) -> Sheet:
    cells = _cells(layout)
    nodes, most = _nodes_to_draw(layout)
    ranks_of = {node: layout.ranks_of_node(node)[:most] for node in nodes}
    fullest = max(len(ranks) for ranks in ranks_of.values())
    per_row = 8 if fullest <= 64 else 16 if fullest <= 256 else 32
    inner, inner_height = cells.extent(fullest, per_row)
    width = max(inner, width_of(node_label(layout.nnodes - 1), 11)) + 2 * _PAD
    height = _LABEL + inner_height + _PAD
    left_out = len(nodes) < layout.nnodes
    places = len(nodes) + left_out
    columns = _columns(places, width + _PAD, height + _PAD)
    boxes = []
    gap = None
    for place in range(places):
        row, column = divmod(place, columns)
        x, y = MARGIN + column * (width + _PAD), top + row * (height + _PAD)
        if left_out and place == places - 2:  # the last node stands behind the gap
            gap = (x + width / 2, y + height / 2)
            continue
        node = nodes[min(place, len(nodes) - 1)]
        boxes.append(Box(node, x, y, width, height, ranks_of[node]))
        cells.put(ranks_of[node], x + _PAD, y + _LABEL, per_row)
    return Sheet(
        arrangement="grid",
        detailed=cells.detailed,
        cell_width=cells.width,
        cell_height=cells.height,
        boxes=tuple(boxes),
        corners=cells.corners,
        right=MARGIN + min(places, columns) * (width + _PAD) - _PAD,
        bottom=top + math.ceil(places / columns) * (height + _PAD) - _PAD,
        gap=gap,
    )


def _nodes_to_draw(layout: Layout) -> tuple[list[int], int]:
    """Return the nodes that are drawn, and the most ranks that are drawn of one."""
    if layout.world_size <= MOST_RANKS:
        return list(range(layout.nnodes)), MOST_RANKS
    count = ranks = 0
    while count < layout.nnodes and (
        count == 0 or ranks + layout.nproc_per_node[count] <= _FEW_RANKS
    ):
        ranks += layout.nproc_per_node[count]
        count += 1
    last = [layout.nnodes - 1] if count < layout.nnodes else []
    return [*range(count), *last], _FEW_RANKS


def _columns(places: int, width: float, height: float) -> int:
    """Return how many boxes stand side by side for a picture that is wider than high."""

    def badness(columns: int) -> float:
        rows = math.ceil(places / columns)
        uneven = 0.2 if places % columns else 0.0
        return abs(math.log(columns * width / (rows * height) / _ASPECT)) + uneven

    return min(range(1, places + 1), key=badness)


# ---- lines ---------------------------------------------------------------------------------


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
