"""A layout as a picture: nodes as boxes, ranks as cells colored by a dim, groups as lines."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from meshrun.errors import UsageError
from meshrun.layout import Layout
from meshrun.report.svg_geometry import (
    BUNDLE_HEAD,
    BUNDLE_TRACK,
    MARGIN,
    TRACK,
    Box,
    DimSummary,
    Lane,
    Line,
    Sheet,
    arrange,
    bundle_heads,
    summarize,
)
from meshrun.report.svg_style import (
    CATEGORIES,
    color_class,
    coordinate_text,
    corners,
    domain_label,
    dot,
    line,
    node_label,
    number,
    rect,
    shorten,
    style_sheet,
    text,
    width_of,
    words,
)
from meshrun.wording import count, plural

_HEAD = 34.0
_KEY = 26.0
_SWATCH = 14.0
_RAMP_SWATCHES = 16
_BOLD = 1.12
"""How much wider bold letters are."""
_LEGEND_ROW = 20.0
_SAMPLE = 34.0
_NTH = ("", " second", " third")
"""Strokes differ where a cell is outlined for one dim of several."""


def choose_color_dim(layout: Layout, asked: str | None) -> int | None:
    """Return the dim that colors the ranks: the one asked for, else the slowest.

    Args:
        layout: Whose ranks are colored.
        asked: A name of a dim, or its index; ``None`` for the slowest that has several indexes.

    Returns:
        The index of the dim, or ``None`` without a mesh.

    Raises:
        UsageError: If there is no such dim, with those there are.
    """
    if asked is None:
        several = [dim for dim, size in enumerate(layout.sizes) if size > 1]
        return next(iter([*several, *range(len(layout.sizes))]), None)
    if layout.mesh is None:
        raise UsageError(
            f"--color-dim {asked} requires --mesh",
            hint=f"--mesh {asked}=8" if asked.isidentifier() else None,
        )
    names = layout.mesh_dim_names or ()
    if asked in names:
        return names.index(asked)
    if asked.isascii() and asked.isdigit() and int(asked) < len(layout.sizes):
        return int(asked)
    known = names or tuple(map(str, range(len(layout.sizes))))
    raise UsageError(
        f"--color-dim: mesh `{layout.mesh}` has no dim `{asked}`",
        hint=f"use a dim of the mesh: {', '.join(f'`{name}`' for name in known)}",
    )


def render_svg(layout: Layout, *, color_dim: int | None = None) -> str:
    """Return a layout as an SVG that needs nothing beside itself.

    Args:
        layout: What to draw.
        color_dim: The dim whose index gives a rank its color; ``None`` for one color.

    Example:
        >>> render_svg(Layout(mesh=None, nproc_per_node=(2,)))[:4]
        '<svg'
    """
    dims = summarize(layout)
    has_key = color_dim is not None
    sheet = arrange(layout, _HEAD + (_KEY if has_key else 0) + 8)
    classes = {rank: _class(layout, rank, color_dim) for rank in sheet.cells.corners}
    head = _headline(layout)
    notes = _left_out(layout, sheet)
    legend_width, legend_height = _legend_size(layout, sheet, dims)
    legend_top = sheet.bottom + 28
    below = legend_top + legend_height
    last_line = below + len(notes) * _LEGEND_ROW - _LEGEND_ROW if dims or notes else sheet.bottom
    width = MARGIN + max(
        sheet.right,
        MARGIN + width_of(head, 16 * _BOLD),
        MARGIN + legend_width,
        *(MARGIN + width_of(note, 11) for note in notes),
    )
    key: list[str] = []
    if color_dim is not None:
        key, key_width = _color_key(layout, color_dim)
        width = max(width, key_width + MARGIN)
    width, height = ceil(width), ceil(last_line + MARGIN)  # no pixel is half the page's
    described = ". ".join([head, *map(str, dims), *notes])
    used = {*classes.values(), *_key_classes(layout, color_dim)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="meshrun" role="img"'
        f' width="{number(width)}" height="{number(height)}"'
        f' viewBox="0 0 {number(width)} {number(height)}">',
        f"<title>{words(head)}</title>",
        f"<desc>{words(described)}.</desc>",
        style_sheet(used),
        '<rect class="page" width="100%" height="100%"/>',  # some viewers draw on black
        text(MARGIN, _HEAD - 8, head, "head"),
        *key,
        *_frames(sheet),
        *_boxes(sheet),
        *(_links(layout, sheet) if sheet.arrangement != "grid" else ()),
        *_cells(layout, sheet, classes),
        *(_links(layout, sheet) if sheet.arrangement == "grid" else ()),
        *_legend(layout, sheet, dims, legend_top),
        *(text(MARGIN, below + row * _LEGEND_ROW, note, "soft") for row, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _headline(layout: Layout) -> str:
    mesh = str(layout.mesh) if layout.mesh else "no mesh"
    least, most = min(layout.nproc_per_node), max(layout.nproc_per_node)
    each = f"{least:,}" if least == most else f"{least:,}-{most:,}"
    domains = len(layout.nodes_per_domain)
    return (
        f"{mesh}: {count(layout.world_size, 'rank')} on {count(layout.nnodes, 'node')}"
        f" \u00d7 {each} worker{plural(most)}"
        + (f" in {count(domains, 'domain')}" if domains else "")
    )


def _class(layout: Layout, rank: int, color_dim: int | None) -> str:
    if color_dim is None:
        return color_class(None, 0)
    return color_class(layout.coordinate(rank)[color_dim], layout.sizes[color_dim])


def _left_out(layout: Layout, sheet: Sheet) -> list[str]:
    """Say which nodes and ranks are not in the picture."""
    notes = []
    if sheet.gap is not None:
        first, last = sheet.boxes[-2].node + 1, sheet.boxes[-1].node - 1
        nodes = count(last - first + 1, "node")
        ranks = sum(layout.nproc_per_node[first : last + 1])
        notes.append(f"not drawn: {nodes}, {first} to {last}, with {count(ranks, 'rank')}")
    cut = [box for box in sheet.boxes if len(box.ranks) < layout.nproc_per_node[box.node]]
    if cut:
        notes.append(f"only the first {len(cut[0].ranks):,} ranks of a node are drawn")
    return notes


# ---- colors -------------------------------------------------------------------------------


def _key_indexes(size: int) -> list[int]:
    """Return the indexes that have a swatch."""
    if size <= len(CATEGORIES):
        return list(range(size))
    count = min(size, _RAMP_SWATCHES)
    return [round(step * (size - 1) / (count - 1)) for step in range(count)]


def _key_classes(layout: Layout, color_dim: int | None) -> set[str]:
    if color_dim is None:
        return set()
    size = layout.sizes[color_dim]
    return {color_class(index, size) for index in _key_indexes(size)}


def _color_key(layout: Layout, dim: int) -> tuple[list[str], float]:
    """Return what says which color is which index, and where it ends."""
    size = layout.sizes[dim]
    y = _HEAD + _KEY / 2
    lead = f"color: index in {layout.dim_labels[dim]}"
    parts = [text(MARGIN, y + 4, lead, "soft")]
    x = MARGIN + width_of(lead, 11) + 8
    each = size <= len(CATEGORIES)
    if not each:
        parts.append(text(x, y + 4, "0", "soft"))
        x += width_of("0", 11) + 4
    for index in _key_indexes(size):
        swatch = rect(x, y - 7, _SWATCH, _SWATCH, ' rx="2"')
        parts.append(f'<g class="cell {color_class(index, size)}">{swatch}</g>')
        x += _SWATCH + (4 if each else 0)
        if each:
            parts.append(text(x, y + 4, str(index), "soft"))
            x += width_of(str(index), 11) + 8
    if not each:
        parts.append(text(x + 4, y + 4, str(size - 1), "soft"))
        x += 4 + width_of(str(size - 1), 11)
    return parts, x


# ---- nodes and ranks -----------------------------------------------------------------------


def _frames(sheet: Sheet) -> Iterator[str]:
    for frame in sheet.frames:
        yield rect(frame.x, frame.y, frame.width, frame.height, ' class="frame" rx="10"')
        yield text(frame.x + 8, frame.y + 14, domain_label(frame.domain), "soft")


def _boxes(sheet: Sheet) -> Iterator[str]:
    for box in sheet.boxes:
        yield rect(box.x, box.y, box.width, box.height, ' class="box" rx="6"')
        middle = sheet.cells.height / 2 + 12 if sheet.arrangement == "rows" else 14
        yield text(box.x + 8, box.y + middle, node_label(box.node), "soft")


def _cells(layout: Layout, sheet: Sheet, classes: dict[int, str]) -> Iterator[str]:
    cells = sheet.cells
    yield "<g>" if cells.detailed else '<g class="small">'
    size = f'width="{number(cells.width)}" height="{number(cells.height)}" rx="3"'
    half = cells.width / 2
    named = layout.dim_labels
    with_coordinate = cells.detailed and bool(layout.sizes)
    baseline = 16.0 if with_coordinate else cells.height / 2 + (4.6 if cells.detailed else 3.2)
    for box in sheet.boxes:
        for rank in box.ranks:
            x, y = cells.corners[rank]
            coordinate = layout.coordinate(rank)
            pairs = zip(named, coordinate, strict=True)
            where = ", ".join(f"{name}={index}" for name, index in pairs)
            about = f"rank {rank}: node {box.node}, local rank {layout.local_rank(rank)}"
            hover = f"{about}; {where}" if where else about
            middle = number(x + half)
            at = (
                f'<text class="at" x="{middle}" y="{number(y + 29)}">'
                f"{coordinate_text(coordinate)}</text>"
                if with_coordinate
                else ""
            )
            yield (
                f'<g class="cell {classes[rank]}"><title>{words(hover)}</title>'
                f'<rect x="{number(x)}" y="{number(y)}" {size}/>'
                f'<text x="{middle}" y="{number(y + baseline)}">{rank}</text>{at}</g>'
            )
    yield "</g>"


# ---- groups and the legend that counts them --------------------------------------------------


def _links(layout: Layout, sheet: Sheet) -> Iterator[str]:
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


def _legend(layout: Layout, sheet: Sheet, dims: list[DimSummary], top: float) -> Iterator[str]:
    """Yield a row a dim: what its groups look like, and how many cross nodes."""
    styles = _outline_styles(layout) if sheet.arrangement == "grid" else {}
    for row, dim in enumerate(reversed(dims)):
        y = top + row * _LEGEND_ROW
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
        y = top + len(dims) * _LEGEND_ROW
        yield text(MARGIN, y, _OUTLINED, "soft")


_OUTLINED = "outlined: the groups of rank 0"


def _legend_size(layout: Layout, sheet: Sheet, dims: list[DimSummary]) -> tuple[float, float]:
    """Return width and height of what :func:`_legend` draws."""
    rows = len(dims)
    width = max((width_of(str(dim), 12) + _SAMPLE + 10 for dim in dims), default=0.0)
    if sheet.arrangement == "grid" and _outline_styles(layout):
        rows += 1
        width = max(width, width_of(_OUTLINED, 11))
    return width, rows * _LEGEND_ROW


# ---- lines ---------------------------------------------------------------------------------


def _guides_down(sheet: Sheet) -> Iterator[str]:
    """From each rank down to the last line it has a dot on, so that dots are found again."""
    ends: dict[int, float] = {}
    for lane in sheet.lanes:
        for one in lane.lines:
            ends.update(dict.fromkeys(one.stops, lane.start + one.track * TRACK))
    for rank, end in sorted(ends.items()):
        x = sheet.middle(rank)
        yield line(x, sheet.cells.corners[rank][1] + sheet.cells.height, x, end, "guide")


def _lane(layout: Layout, sheet: Sheet, lane: Lane, box: Box | None = None) -> Iterator[str]:
    """A dim's groups, each as a line with a dot below each of its ranks."""
    here = [one for one in lane.lines if box is None or one.stops[0] in box.ranks]
    if not here:
        return
    x, y = (MARGIN, 0.0) if box is None else (box.x + 8, box.y)
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
        drawn = [rank for rank in layout.group(dim, 0) if rank in sheet.cells.corners]
        about = f"{layout.dim_labels[dim]}: group of rank 0"
        yield f'<g class="marks"><g class="{style}"><title>{words(about)}</title>'
        for rank in drawn[1:] if place else drawn:  # rank 0 is in a group of each
            x, y = sheet.cells.corners[rank]
            width, height = sheet.cells.width + 3, sheet.cells.height + 3
            yield _outline(style, x - 1.5, y - 1.5, width, height)
        yield "</g></g>"
    if sheet.gap is not None:
        x, y = sheet.gap
        yield "".join(
            f'<circle class="dot" cx="{number(x + 9 * at)}" cy="{number(y)}" r="2.2"/>'
            for at in (-1, 0, 1)
        )
