"""The elements of an SVG that show groups: lines, outlines, and the legend that counts them."""

from __future__ import annotations

from collections.abc import Iterator

from meshrun.layout import Layout
from meshrun.report.svg_geometry import (
    BUNDLE_HEAD,
    BUNDLE_TRACK,
    MARGIN,
    TRACK,
    Box,
    Lane,
    Sheet,
)
from meshrun.report.svg_groups import DimSummary, Line, bundle_heads
from meshrun.report.svg_style import (
    corners,
    dot,
    line,
    number,
    rect,
    shorten,
    text,
    width_of,
    words,
)
from meshrun.wording import count

LEGEND_ROW = 20.0
_SAMPLE = 34.0
_NTH = ("", " second", " third")
"""Strokes differ where a cell is outlined for one dim of several."""


def draw_links(layout: Layout, sheet: Sheet) -> Iterator[str]:
    """Yield what shows the groups of this picture."""
    if sheet.arrangement == "line":
        yield from _guides_down(sheet)
        for lane in sheet.lanes:
            yield from _lane(layout, sheet, lane)
    elif sheet.arrangement == "rows":
        for box in sheet.boxes:
            for lane in sheet.lanes:
                yield from _lane(layout, sheet, lane, box)
        yield from _bundles(layout, sheet)
    else:
        yield from _outlines(layout, sheet)


def draw_legend(layout: Layout, sheet: Sheet, dims: list[DimSummary], top: float) -> Iterator[str]:
    """Yield a row a dim: what its groups look like, and how many cross nodes."""
    styles = _outline_styles(layout) if sheet.arrangement == "grid" else {}
    for row, dim in enumerate(reversed(dims)):
        y = top + row * LEGEND_ROW
        name = "over" if dim.crossing else "in"
        if dim.dim in styles:
            name = styles[dim.dim]
            sample = _outline(name, MARGIN + 3, y - 11, 26, 14)
            yield f'<g class="marks"><g class="{name}">{sample}</g></g>'
        elif dim.size == 1:
            yield f'<g class="in">{dot(MARGIN + _SAMPLE / 2, y - 4)}</g>'
        elif sheet.arrangement != "grid":
            first, last = MARGIN + 3, MARGIN + _SAMPLE
            ends = dot(first, y - 4) + dot(last, y - 4)
            yield f'<g class="{name}">{line(first, y - 4, last, y - 4)}{ends}</g>'
        yield text(MARGIN + _SAMPLE + 10, y, str(dim))
    if styles:
        y = top + len(dims) * LEGEND_ROW
        yield text(MARGIN, y, _OUTLINED, "soft")


_OUTLINED = "outlined: the groups of rank 0"


def legend_size(layout: Layout, sheet: Sheet, dims: list[DimSummary]) -> tuple[float, float]:
    """Return width and height of what :func:`draw_legend` draws."""
    rows = len(dims)
    width = max((width_of(str(dim), 12) + _SAMPLE + 10 for dim in dims), default=0.0)
    if sheet.arrangement == "grid" and _outline_styles(layout):
        rows += 1
        width = max(width, width_of(_OUTLINED, 11))
    return width, rows * LEGEND_ROW


# ---- lines ---------------------------------------------------------------------------------


def _guides_down(sheet: Sheet) -> Iterator[str]:
    """From each rank down to the last line it has a dot on, so that dots are found again."""
    ends: dict[int, float] = {}
    for lane in sheet.lanes:
        for one in lane.lines:
            ends.update(dict.fromkeys(one.stops, lane.start + one.track * TRACK))
    for rank, end in sorted(ends.items()):
        x = sheet.middle(rank)
        yield line(x, sheet.corners[rank][1] + sheet.cell_height, x, end, "guide")


def _lane(layout: Layout, sheet: Sheet, lane: Lane, box: Box | None = None) -> Iterator[str]:
    """A dim's groups, each as a line with a dot below each of its ranks."""
    here = [one for one in lane.lines if box is None or one.stops[0] in box.ranks]
    if not here:
        return
    x, y = (MARGIN, 0.0) if box is None else (MARGIN + 8, box.y)
    label = layout.dim_labels[lane.dim]
    middle = y + lane.start + max(one.track for one in here) * TRACK / 2
    yield text(x, middle + 4, shorten(label))
    for one in here:
        level = y + lane.start + one.track * TRACK
        yield _joined(
            one,
            f"{label}: ranks {_listed(one.stops)}",
            [(sheet.middle(rank), level) for rank in one.stops],
        )


def _bundles(layout: Layout, sheet: Sheet) -> Iterator[str]:
    """Groups that cross nodes, as lines beside the rows: those of the same nodes are one line."""
    middles = {box.node: box.y + box.height / 2 for box in sheet.boxes}
    ends: dict[int, float] = {}
    for lane in sheet.bundles:
        for one in lane.lines:
            ends.update(dict.fromkeys(one.stops, lane.start + one.track * BUNDLE_TRACK))
    for box in sheet.boxes:
        if box.node in ends:
            y = middles[box.node]
            yield line(box.x + box.width, y, ends[box.node], y, "guide")
    for lane in sheet.bundles:
        label = layout.dim_labels[lane.dim]
        top = sheet.boxes[0].y - BUNDLE_HEAD
        name, groups = bundle_heads(layout, lane.dim, lane.lines)
        yield text(lane.start - 3, top + 12, name)
        yield text(lane.start - 3, top + 26, groups, "soft")
        for one in lane.lines:
            x = lane.start + one.track * BUNDLE_TRACK
            groups = count(one.groups, "group")
            yield _joined(
                one,
                f"{label}: {groups} on nodes {_listed(one.stops)}",
                [(x, middles[node]) for node in one.stops],
            )


def _joined(one: Line, title: str, places: list[tuple[float, float]]) -> str:
    (x1, y1), (x2, y2) = places[0], places[-1]
    dots = "".join(dot(x, y) for x, y in places)
    name = "over" if one.crosses else "in"
    return f'<g class="{name}"><title>{words(title)}</title>{line(x1, y1, x2, y2)}{dots}</g>'


def _listed(stops: tuple[int, ...]) -> str:
    return ", ".join(map(str, stops))


# ---- outlines ------------------------------------------------------------------------------


def _outline_styles(layout: Layout) -> dict[int, str]:
    """Return the classes of the outline of each dim that has several groups, fastest first."""
    counts = {"in": 0, "over": 0}
    styles = {}
    for dim in reversed(range(len(layout.sizes))):
        if 1 < layout.sizes[dim] < layout.world_size:
            name = "over" if layout.crosses_nodes(layout.group(dim, 0)) else "in"
            styles[dim] = name + _NTH[min(counts[name], len(_NTH) - 1)]
            counts[name] += 1
    return styles


def _outline(style: str, x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle, or its corners for the second dim of those that cross no nodes."""
    if style == "in second":
        return corners(x, y, width, height)
    return rect(x, y, width, height, ' rx="4"')


def _outlines(layout: Layout, sheet: Sheet) -> Iterator[str]:
    """Mark the groups of rank 0, which show the pattern where lines would be a thicket."""
    for place, (dim, style) in enumerate(_outline_styles(layout).items()):
        drawn = [rank for rank in layout.group(dim, 0) if rank in sheet.corners]
        about = f"{layout.dim_labels[dim]}: group of rank 0"
        yield f'<g class="marks"><g class="{style}"><title>{words(about)}</title>'
        for rank in drawn[1:] if place else drawn:  # rank 0 is in a group of each
            x, y = sheet.corners[rank]
            width, height = sheet.cell_width + 3, sheet.cell_height + 3
            yield _outline(style, x - 1.5, y - 1.5, width, height)
        yield "</g></g>"
    if sheet.gap is not None:
        x, y = sheet.gap
        yield "".join(
            f'<circle class="dot" cx="{number(x + 9 * at)}" cy="{number(y)}" r="2.2"/>'
            for at in (-1, 0, 1)
        )
