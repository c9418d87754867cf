"""The positions of nodes and ranks in an SVG, and the lines of groups between them. Pure.

There are three arrangements: few ranks are in one line, with every group below them; more ranks are
in one row per node, with groups that cross nodes beside the rows; many ranks are in a grid of
nodes, in which lines could not be followed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, product
from typing import Literal

from msgspec import Struct

from meshrun.layout import Layout
from meshrun.report import svg_style as svg
from meshrun.wording import count, plural

MARGIN = 16.0
_TRACK = 9.0
"""Distance between the lines of a lane."""
_BUNDLE_TRACK = 14.0
_BUNDLE_HEAD = 34.0
_PAD = 8.0
_GAP = 4.0
_LABEL = 20.0
"""Height of the name of a node above its cells."""
_IN_LINE = 16
_IN_ROWS = 16
_DETAILED = 128
_MAX_RANKS = 4096
"""If there are more ranks, only the first nodes and the last one are drawn."""
_FEW_RANKS = 512
_ASPECT = 1.5

Arrangement = Literal["line", "rows", "grid"]


class Line(Struct, frozen=True):
    """A line for a group, or for several groups that connect the same nodes.

    Args:
        stops: The ranks or nodes that it connects, in order.
        track: Its place among the lines of the dim; lines on the same track do not overlap.
        crosses: Whether it connects several nodes.
        groups: The number of groups that it represents.
    """

    stops: tuple[int, ...]
    track: int
    crosses: bool
    groups: int = 1


class Box(Struct, frozen=True):
    """The place of a node, with the ranks that are drawn in it, or of a domain of nodes."""

    number: int
    x: float
    y: float
    width: float
    height: float
    ranks: Sequence[int] = ()


class Sheet(Struct):
    """The places of everything in a picture."""

    arrangement: Arrangement
    detailed: bool
    """Whether cells have room for coordinates."""
    cell_width: float
    cell_height: float
    corners: dict[int, tuple[float, float]] = {}
    """Upper left corner of the cell of each rank that is drawn."""
    boxes: list[Box] = []
    frames: list[Box] = []
    """The places of domains."""
    lines: list[str] = []
    """The elements that show groups as lines."""
    right: float = 0.0
    bottom: float = 0.0
    gap: tuple[float, float] | None = None
    """Middle of the place in the grid that represents the omitted nodes."""

    def place(self, ranks: Sequence[int], x: float, y: float, per_row: int) -> None:
        """Place the cells of ranks in rows, from ``x``, ``y`` on."""
        for place, rank in enumerate(ranks):
            row, column = divmod(place, per_row)
            self.corners[rank] = (
                x + column * (self.cell_width + _GAP),
                y + row * (self.cell_height + _GAP),
            )

    def middle(self, rank: int) -> float:
        """Return the x in the middle of a rank's cell."""
        return self.corners[rank][0] + self.cell_width / 2

    def extent(self, count: int, per_row: int) -> tuple[float, float]:
        """Return the width and height of ``count`` cells."""
        columns = max(1, min(count, per_row))  # a node without ranks has room for one
        rows = max(1, math.ceil(count / max(1, per_row)))
        return columns * (self.cell_width + _GAP) - _GAP, rows * (self.cell_height + _GAP) - _GAP


def arrange(layout: Layout, top: float) -> Sheet:
    """Return the places of everything, below ``top``."""
    if layout.world_size <= _IN_LINE:
        return _in_line(layout, top)
    if layout.nnodes <= _IN_ROWS and max(layout.nproc_per_node) <= _IN_ROWS:
        return _in_rows(layout, top)
    return _in_grid(layout, top)


# ---- cells ---------------------------------------------------------------------------------


def _new_sheet(layout: Layout, arrangement: Arrangement) -> Sheet:
    """Return a sheet without anything, but with the size of its cells."""
    last = layout.world_size - 1
    if layout.world_size > _DETAILED:
        return Sheet(arrangement, False, max(20.0, svg.width_of(str(last), 9) + 5), 16.0)
    widest = svg.width_of(",".join(str(size - 1) for size in layout.sizes), 9)
    width = max(36.0, svg.width_of(str(last), 13) + 10, widest + 8)
    return Sheet(arrangement, True, width, 36.0 if layout.sizes else 30.0)


# ---- domains -------------------------------------------------------------------------------


def _first_nodes(layout: Layout) -> dict[int, int]:
    """Return the domains by their first nodes."""
    starts = accumulate(layout.nodes_per_domain[:-1], initial=0)
    return {node: domain for domain, node in enumerate(starts) if layout.nodes_per_domain}


def _frames_around(boxes: Sequence[Box], domains: dict[int, int]) -> list[Box]:
    """Return a frame around the boxes of each domain, which are in one line or column."""
    groups: list[list[Box]] = []
    for box in boxes:
        if box.number in domains:
            groups.append([])
        if groups:
            groups[-1].append(box)
    frames = []
    for group in groups:
        first, last = group[0], group[-1]
        width = last.x + last.width - first.x + 2 * _PAD
        height = last.y + last.height - first.y + _LABEL + _PAD
        number = domains[first.number]
        frames.append(Box(number, first.x - _PAD, first.y - _LABEL, width, height))
    return frames


# ---- a line of nodes -----------------------------------------------------------------------


def _in_line(layout: Layout, top: float) -> Sheet:
    sheet, domains = _new_sheet(layout, "line"), _first_nodes(layout)
    in_slots = [layout.rank_in_slot(slot) for slot in range(layout.world_size)]
    found = {dim: _lines_of_ranks(layout, dim, in_slots) for dim in range(len(layout.sizes))}
    x = MARGIN + _lane_label_width(layout, found)
    top += _LABEL if domains else 0
    for node in range(layout.nnodes):
        if node in domains:
            x += 2 * _PAD if node else _PAD
        ranks = layout.ranks_of_node(node)
        inner, height = sheet.extent(len(ranks), len(ranks))
        width = max(inner, svg.width_of(f"node {node}", 11)) + 2 * _PAD
        sheet.boxes.append(Box(node, x, top, width, _LABEL + height + _PAD, ranks))
        sheet.place(ranks, x + (width - inner) / 2, top + _LABEL, len(ranks))
        x += width + 2 * _PAD
    around = _PAD if domains else 0
    sheet.frames, sheet.right = _frames_around(sheet.boxes, domains), x - 2 * _PAD + around
    starts, sheet.bottom = _stack_lanes(found, top + sheet.boxes[0].height + around + 8)
    ends = {
        rank: start + line.track * _TRACK
        for dim, start in starts.items()
        for line in found[dim]
        for rank in line.stops
    }
    for rank, end in sorted(ends.items()):
        x, y = sheet.middle(rank), sheet.corners[rank][1] + sheet.cell_height
        sheet.lines.append(svg.line(x, y, x, end, "guide"))
    for dim, start in starts.items():
        sheet.lines += _lane(layout.dim_labels[dim], found[dim], sheet, MARGIN, start)
    return sheet


def _lane_label_width(layout: Layout, found: Mapping[int, Sequence[Line]]) -> float:
    labels = [svg.shorten_label(layout.dim_labels[dim]) for dim, lines in found.items() if lines]
    return max((svg.width_of(label, 12) + 10 for label in labels), default=0.0)


def _stack_lanes(found: Mapping[int, Sequence[Line]], y: float) -> tuple[dict[int, float], float]:
    """Return the first track of each dim, the fastest dim on top, and the lower edge."""
    starts = {}
    for dim, lines in sorted(found.items(), reverse=True):
        if lines:
            starts[dim] = y + 10
            y += 10 + max(line.track for line in lines) * _TRACK + 8
    return starts, y


# ---- a row a node --------------------------------------------------------------------------


def _in_rows(layout: Layout, top: float) -> Sheet:
    sheet, domains = _new_sheet(layout, "rows"), _first_nodes(layout)
    dims = range(len(layout.sizes))
    nodes = [layout.ranks_of_node(node) for node in range(layout.nnodes)]
    by_node = [{dim: _lines_of_ranks(layout, dim, ranks) for dim in dims} for ranks in nodes]
    found = {dim: [line for lines in by_node for line in lines[dim]] for dim in dims}
    bundles = {dim: across for dim in reversed(dims) if (across := _lines_of_nodes(layout, dim))}
    names = svg.width_of(f"node {layout.nnodes - 1}", 11) + 12
    around = _PAD if domains else 0
    left = MARGIN + around
    cells_at = left + _PAD + max(names, _lane_label_width(layout, found))
    inner, height = sheet.extent(max(layout.nproc_per_node), _IN_ROWS)
    starts, box_height = _stack_lanes(found, _PAD + height)
    box_height += 3 if starts else _PAD
    y = top + (_BUNDLE_HEAD if bundles else 0)
    for node, ranks in enumerate(nodes):
        if node in domains:
            y += _LABEL + (_PAD if node else 0)
        sheet.boxes.append(Box(node, left, y, cells_at + inner + _PAD - left, box_height, ranks))
        sheet.place(ranks, cells_at, y + _PAD, _IN_ROWS)
        for dim, start in starts.items():
            lines = by_node[node][dim]
            sheet.lines += _lane(layout.dim_labels[dim], lines, sheet, left + 8, y + start)
        y += box_height + _PAD
    sheet.frames, sheet.bottom = _frames_around(sheet.boxes, domains), y - _PAD + around
    sheet.right = left + sheet.boxes[0].width + around
    _add_bundles(layout, sheet, bundles)
    return sheet


# ---- a grid of nodes -----------------------------------------------------------------------


def _in_grid(layout: Layout, top: float) -> Sheet:
    sheet = _new_sheet(layout, "grid")
    nodes, most = _nodes_to_draw(layout)
    ranks_of = {node: layout.ranks_of_node(node)[:most] for node in nodes}
    fullest = max(len(ranks) for ranks in ranks_of.values())
    per_row = 8 if fullest <= 64 else 16 if fullest <= 256 else 32
    inner, inner_height = sheet.extent(fullest, per_row)
    width = max(inner, svg.width_of(f"node {layout.nnodes - 1}", 11)) + 2 * _PAD
    height = _LABEL + inner_height + _PAD
    groups = _drawn_by_domain(layout, nodes)
    grid = _best_grid(
        [len(members) for _, members in groups], width, height, bool(_first_nodes(layout))
    )
    for number, (domain, members) in enumerate(groups):
        left, above = grid.corner(number)
        for place, node in enumerate(members):
            row, column = divmod(place, grid.columns)
            x = MARGIN + left + column * (width + _PAD)
            y = top + above + row * (height + _PAD)
            sheet.right, sheet.bottom = max(sheet.right, x + width), max(sheet.bottom, y + height)
            if node is None:
                sheet.gap = (x + width / 2, y + height / 2)
                continue
            sheet.boxes.append(Box(node, x, y, width, height, ranks_of[node]))
            sheet.place(ranks_of[node], x + _PAD, y + _LABEL, per_row)
        if domain is not None:
            size = grid.frame(len(members))
            sheet.frames.append(Box(domain, MARGIN + left - _PAD, top + above - _LABEL, *size))
    if sheet.frames:
        sheet.right, sheet.bottom = sheet.right + _PAD, sheet.bottom + _PAD
    return sheet


class _Grid(Struct, frozen=True):
    """A grid of domains, each a grid of nodes; without domains, one grid without a frame."""

    columns: int
    """Nodes side by side in a domain."""
    across: int
    """Domains side by side."""
    most: int
    """Nodes in the largest domain."""
    step: tuple[float, float]
    """Distance between nodes, across and down."""
    is_framed: bool

    @property
    def pitch(self) -> tuple[float, float]:
        """Distance between domains, across and down."""
        wide, high = self.columns * self.step[0], math.ceil(self.most / self.columns) * self.step[1]
        return (wide + 2 * _PAD, high + _LABEL + _PAD) if self.is_framed else (wide, high)

    def corner(self, number: int) -> tuple[float, float]:
        """Return the place of the first node of a domain."""
        row, column = divmod(number, self.across)
        inset = (_PAD, _LABEL) if self.is_framed else (0.0, 0.0)
        return column * self.pitch[0] + inset[0], row * self.pitch[1] + inset[1]

    def frame(self, nodes: int) -> tuple[float, float]:
        """Return the width and height of the frame around a number of nodes."""
        rows = math.ceil(nodes / self.columns)
        return min(nodes, self.columns) * self.step[0] + _PAD, rows * self.step[1] + _LABEL


def _best_grid(sizes: Sequence[int], width: float, height: float, is_framed: bool) -> _Grid:
    """Return the grid with an aspect ratio close to ``_ASPECT`` and few empty places."""
    most, step = max(sizes), (width + _PAD, height + _PAD)

    def badness(grid: _Grid) -> float:
        wide, high = grid.pitch
        rows, rows_each = math.ceil(len(sizes) / grid.across), math.ceil(most / grid.columns)
        places = rows * grid.across * rows_each * grid.columns
        emptiness = math.log(places / (len(sizes) * most))
        return abs(math.log(grid.across * wide / (rows * high) / _ASPECT)) + 2 * emptiness

    choices = product(range(1, most + 1), range(1, len(sizes) + 1))
    return min((_Grid(*choice, most, step, is_framed) for choice in choices), key=badness)


def _drawn_by_domain(
    layout: Layout, nodes: Sequence[int]
) -> list[tuple[int | None, list[int | None]]]:
    """Return each domain with its nodes that are drawn; ``None`` represents the omitted ones."""
    starts = [*_first_nodes(layout)]
    by_domain = groupby(nodes, lambda node: bisect_right(starts, node) - 1 if starts else None)
    groups: list[tuple[int | None, list[int | None]]] = [
        (domain, [*members]) for domain, members in by_domain
    ]
    if len(nodes) < layout.nnodes:  # the last node follows the gap
        if len(groups[-1][1]) > 1:
            groups[-1][1].insert(-1, None)
        else:
            groups.insert(-1, (None, [None]))
    return groups


def _nodes_to_draw(layout: Layout) -> tuple[list[int], int]:
    """Return the nodes that are drawn, and the maximum number of ranks drawn of a node."""
    if layout.world_size <= _MAX_RANKS:
        return list(range(layout.nnodes)), _MAX_RANKS
    first = max(1, bisect_right([*accumulate(layout.nproc_per_node)], _FEW_RANKS))
    last = [layout.nnodes - 1] if first < layout.nnodes else []
    return [*range(first), *last], _FEW_RANKS


# ---- lines ---------------------------------------------------------------------------------


def _lines_of_ranks(layout: Layout, dim: int, ranks: Sequence[int]) -> list[Line]:
    """Return a line for each group of ``dim`` whose ranks are all in ``ranks``, in their order."""
    place = {rank: index for index, rank in enumerate(ranks)}
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


def _lines_of_nodes(layout: Layout, dim: int) -> list[Line]:
    """Return a line for each set of nodes that groups of ``dim`` connect."""
    counts: Counter[tuple[int, ...]] = Counter()
    for group in layout.groups(dim):
        nodes = tuple(sorted({layout.node_rank(rank) for rank in group}))
        if len(nodes) > 1:
            counts[nodes] += 1
    connected = sorted(counts)
    tracks = _tracks([(nodes[0], nodes[-1]) for nodes in connected])
    return [
        Line(nodes, track, crosses=True, groups=counts[nodes])
        for nodes, track in zip(connected, tracks, strict=True)
    ]


def _tracks(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first free track for each span, in order of their starts."""
    ends: list[int] = []
    tracks = []
    for first, last in spans:
        free = next((track for track, end in enumerate(ends) if end < first), len(ends))
        ends[free:] = [last, *ends[free + 1 :]]
        tracks.append(free)
    return tracks


def _lane(label: str, lines: Sequence[Line], sheet: Sheet, x: float, y: float) -> Iterator[str]:
    """Yield a dim's groups, each as a line with a dot below each of its ranks."""
    if not lines:
        return
    middle = y + max(one.track for one in lines) * _TRACK / 2
    yield svg.text(x, middle + 4, svg.shorten_label(label))
    for one in lines:
        level = y + one.track * _TRACK
        yield _joined(one, f"{label}: ranks", [(sheet.middle(rank), level) for rank in one.stops])


def _add_bundles(layout: Layout, sheet: Sheet, bundles: Mapping[int, Sequence[Line]]) -> None:
    """Add groups that cross nodes as lines beside the rows, one for each set of nodes.

    A guide leads to the last of them from each of its nodes.
    """
    middles = {box.number: box.y + box.height / 2 for box in sheet.boxes}
    top = sheet.boxes[0].y - _BUNDLE_HEAD
    elements: list[str] = []
    ends: dict[int, float] = {}
    for dim, lines in bundles.items():
        x = sheet.right + 24
        counts = sorted({one.groups for one in lines})
        shown = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        label, groups = layout.dim_labels[dim], f"{shown} group{plural(counts[-1])} each"
        name = svg.shorten_label(label)
        elements += [svg.text(x - 3, top + 12, name), svg.text(x - 3, top + 26, groups, "soft")]
        for one in lines:
            at = x + one.track * _BUNDLE_TRACK
            ends.update(dict.fromkeys(one.stops, at))
            what = f"{label}: {count(one.groups, 'group')} on nodes"
            elements.append(_joined(one, what, [(at, middles[node]) for node in one.stops]))
        tracks = max(one.track for one in lines) * _BUNDLE_TRACK
        sheet.right = x + max(svg.width_of(name, 12), svg.width_of(groups, 11), tracks)
    for box in sheet.boxes:
        if box.number in ends:
            y = middles[box.number]
            sheet.lines.append(svg.line(box.x + box.width, y, ends[box.number], y, "guide"))
    sheet.lines += elements


def _joined(one: Line, what: str, places: Sequence[tuple[float, float]]) -> str:
    (x1, y1), (x2, y2) = places[0], places[-1]
    drawn = svg.line(x1, y1, x2, y2) + "".join(svg.dot(x, y) for x, y in places)
    name, title = "over" if one.crosses else "in", f"{what} {', '.join(map(str, one.stops))}"
    return f'<g class="{name}"><title>{svg.words(title)}</title>{drawn}</g>'
