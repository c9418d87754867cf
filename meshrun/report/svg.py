"""A layout as a picture: nodes as boxes, ranks as cells colored by a dim, groups as lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from meshrun.errors import UsageError
from meshrun.layout import Layout
from meshrun.report import svg_style as svg
from meshrun.report.svg_geometry import (
    MARGIN,
    Sheet,
    arrange,
)
from meshrun.wording import count, plural, use_dim

HEAD = 34.0
"""Height of the heading."""
_KEY = 26.0
SWATCH = 14.0
"""The size of a color in the key of a color scale."""
RAMP_SWATCHES = 16
"""How many of them show a scale."""
_LEGEND_ROW = 20.0
_SAMPLE = 34.0
_NTH = ("", " second", " third")
"""Classes that distinguish the outlines of several dims."""
_OUTLINED = "outlined: the groups of rank 0"


def choose_color_dim(layout: Layout, requested: str | None) -> int | None:
    """Return the index of the dim that colors the ranks; ``None`` without a mesh.

    It is the one requested by name or index, else the slowest one larger than 1.

    Raises:
        UsageError: If there is no such dim; lists the dims of the mesh.
    """
    if requested is None:
        several = [dim for dim, size in enumerate(layout.sizes) if size > 1]
        return next(iter([*several, *range(len(layout.sizes))]), None)
    if layout.mesh is None:
        raise UsageError(
            f"--color-dim {requested} requires --mesh",
            hint=f"--mesh {requested}=8" if requested.isidentifier() else None,
        )
    keys = layout.mesh.keys
    indices = [*map(str, range(len(keys)))]
    if requested in (*keys, *indices):
        return (keys if requested in keys else indices).index(requested)
    raise UsageError(
        f"--color-dim: mesh `{layout.mesh}` has no dim `{requested}`",
        hint=use_dim(keys),
    )


def render_svg(layout: Layout, *, color_dim: int | None = None) -> str:
    """Return a layout as a self-contained SVG, with ranks colored by their index in a dim.

    Example:
        >>> render_svg(Layout(mesh=None, nproc_per_node=(2,)))[:4]
        '<svg'
    """
    sheet = arrange(layout, HEAD + (0 if color_dim is None else _KEY) + 8)
    is_grid = sheet.arrangement == "grid"
    drawing = svg.Drawing()
    drawing.right = sheet.right
    if color_dim is not None:
        _add_color_key(drawing, layout, color_dim)
    drawing.add(*_frames(sheet), *boxes(sheet), *sheet.lines, *_cells(layout, sheet, color_dim))
    if is_grid:
        drawing.add(*_outlines(layout, sheet))
    dims = [_describe(layout, dim) for dim in range(len(layout.sizes))]
    notes = _omissions(layout, sheet)
    y = sheet.bottom + 28
    _add_legend(drawing, layout, sheet, dims, y)
    y += len(dims) * _LEGEND_ROW
    remarks = [_OUTLINED, *notes] if is_grid and _outline_styles(layout) else notes
    for row, remark in enumerate(remarks):
        drawing.text(MARGIN, y + row * _LEGEND_ROW, remark, "soft")
    last_line = y + (len(remarks) - 1) * _LEGEND_ROW if dims or remarks else sheet.bottom
    head = _headline(layout)
    return page(head, f"{'. '.join([head, *dims, *notes])}.", drawing, bottom=last_line)


def page(
    head: str, description: str, drawing: svg.Drawing, *, bottom: float, more_styles: str = ""
) -> str:
    """Return a drawing as an SVG with a heading, in whole pixels."""
    heading = svg.Drawing()
    heading.text(MARGIN, HEAD - 8, head, "head")
    width, height = ceil(max(heading.right, drawing.right) + MARGIN), ceil(bottom + MARGIN)
    elements = "\n".join((*heading.elements, *drawing.elements))
    colors = re.findall(r'<g class="cell (\w+)"', elements)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="meshrun" role="img"'
            f' width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            f"<title>{svg.words(head)}</title>",
            f"<desc>{svg.words(description)}</desc>",
            svg.style_sheet(colors) + more_styles,
            '<rect class="page" width="100%" height="100%"/>',  # some viewers have a black page
            elements,
            "</svg>\n",
        )
    )


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


def _describe(layout: Layout, dim: int) -> str:
    """Return a dim's row of the legend."""
    size = layout.sizes[dim]
    total = layout.world_size // size
    groups, cross = count(total, "group"), "crosses" if total == 1 else "cross"
    text = f"{layout.dim_labels[dim]}: {layout.count_crossing(dim):,} of {groups} {cross} nodes"
    if layout.nodes_per_domain:
        text += f", {layout.count_crossing(dim, 'domains'):,} {cross} domains"
    return text if size > 1 else f"{text} (of one rank)"


def _omissions(layout: Layout, sheet: Sheet) -> list[str]:
    """Return notes on the nodes and ranks that are not drawn."""
    notes = []
    if sheet.gap is not None:
        first, last = sheet.boxes[-2].number + 1, sheet.boxes[-1].number - 1
        nodes = count(last - first + 1, "node")
        ranks = sum(layout.nproc_per_node[first : last + 1])
        notes.append(f"not drawn: {nodes}, {first} to {last}, with {count(ranks, 'rank')}")
    cut = [box for box in sheet.boxes if len(box.ranks) < layout.nproc_per_node[box.number]]
    if cut:
        notes.append(f"only the first {len(cut[0].ranks):,} ranks of a node are drawn")
    return notes


# ---- colors -------------------------------------------------------------------------------


def _key_indexes(size: int) -> list[int]:
    """Return the indexes that the key shows."""
    if size <= len(svg.CATEGORIES):
        return list(range(size))
    shown = min(size, RAMP_SWATCHES)
    return [round(step * (size - 1) / (shown - 1)) for step in range(shown)]


def _add_color_key(drawing: svg.Drawing, layout: Layout, dim: int) -> None:
    size = layout.sizes[dim]
    y = HEAD + _KEY / 2
    each = size <= len(svg.CATEGORIES)
    x = drawing.text(MARGIN, y + 4, f"color: index in {layout.dim_labels[dim]}", "soft") + 8
    if not each:
        x = drawing.text(x, y + 4, "0", "soft") + 4
    for index in _key_indexes(size):
        swatch = svg.rect(x, y - 7, SWATCH, SWATCH, ' rx="2"')
        drawing.add(f'<g class="cell {svg.color_class(index, size)}">{swatch}</g>')
        x += SWATCH
        if each:
            x = drawing.text(x + 4, y + 4, str(index), "soft") + 8
    if not each:
        drawing.text(x + 4, y + 4, str(size - 1), "soft")


# ---- nodes and ranks -----------------------------------------------------------------------


def _frames(sheet: Sheet) -> Iterator[str]:
    for frame in sheet.frames:
        yield svg.rect(frame.x, frame.y, frame.width, frame.height, ' class="frame" rx="10"')
        yield svg.text(frame.x + 8, frame.y + 14, f"domain {frame.number}", "soft")


def boxes(sheet: Sheet, titles: Mapping[int, str] | None = None) -> Iterator[str]:
    """Yield a labeled box for each node, with the titles of nodes that have one."""
    for box in sheet.boxes:
        frame = svg.rect(box.x, box.y, box.width, box.height, ' class="box" rx="6"')
        title = (titles or {}).get(box.number)
        yield frame if title is None else f"<g><title>{svg.words(title)}</title>{frame}</g>"
        middle = sheet.cell_height / 2 + 12 if sheet.arrangement == "rows" else 14
        yield svg.text(box.x + 8, box.y + middle, f"node {box.number}", "soft")


def _cells(layout: Layout, sheet: Sheet, color_dim: int | None) -> Iterator[str]:
    yield "<g>" if sheet.detailed else '<g class="small">'
    for box in sheet.boxes:
        for rank in box.ranks:
            coordinate = layout.coordinate(rank)
            pairs = zip(layout.dim_labels, coordinate, strict=True)
            where = ", ".join(f"{name}={index}" for name, index in pairs)
            title = f"rank {rank}: node {box.number}, local rank {layout.local_rank(rank)}"
            title += f"; {where}" if where else ""
            color = svg.PLAIN
            if color_dim is not None:
                color = svg.color_class(coordinate[color_dim], layout.sizes[color_dim])
            corner, detail = sheet.corners[rank], ",".join(map(str, coordinate))
            yield cell(sheet, corner, color, title, label=rank, detail=detail)
    yield "</g>"


def cell(
    sheet: Sheet, corner: tuple[float, float], name: str, title: str, *, label: int, detail: str
) -> str:
    """Return the cell of a rank, with a detail below its label if there is room."""
    (x, y), half = corner, sheet.cell_height / 2
    middle = svg.number(x + sheet.cell_width / 2)
    baseline, below = half + (4.6 if sheet.detailed else 3.2), ""
    if sheet.detailed and detail:
        baseline = half - 2
        below = f'<text class="at" x="{middle}" y="{svg.number(y + half + 11)}">{detail}</text>'
    size = f'width="{svg.number(sheet.cell_width)}" height="{svg.number(sheet.cell_height)}" rx="3"'
    return (
        f'<g class="cell {name}"><title>{svg.words(title)}</title>'
        f'<rect x="{svg.number(x)}" y="{svg.number(y)}" {size}/>'
        f'<text x="{middle}" y="{svg.number(y + baseline)}">{label}</text>{below}</g>'
    )


# ---- the legend ----------------------------------------------------------------------------


def _add_legend(
    drawing: svg.Drawing, layout: Layout, sheet: Sheet, dims: Sequence[str], top: float
) -> None:
    """Add a row for each dim, fastest first: a sample of its groups, and how many cross nodes."""
    styles = _outline_styles(layout) if sheet.arrangement == "grid" else {}
    for row, dim in enumerate(reversed(range(len(dims)))):
        y = top + row * _LEGEND_ROW
        name = styles.get(dim, "over" if layout.count_crossing(dim) else "in")
        if dim in styles:
            sample = _outline(name, MARGIN + 3, y - 11, 26, 14)
            drawing.add(f'<g class="marks"><g class="{name}">{sample}</g></g>')
        elif layout.sizes[dim] == 1:
            drawing.add(f'<g class="in">{svg.dot(MARGIN + _SAMPLE / 2, y - 4)}</g>')
        elif sheet.arrangement != "grid":
            first, last = MARGIN + 3, MARGIN + _SAMPLE
            ends = svg.dot(first, y - 4) + svg.dot(last, y - 4)
            drawing.add(f'<g class="{name}">{svg.line(first, y - 4, last, y - 4)}{ends}</g>')
        drawing.text(MARGIN + _SAMPLE + 10, y, dims[dim])


# ---- outlines ------------------------------------------------------------------------------


def _outline_styles(layout: Layout) -> dict[int, str]:
    """Return the classes of the outline of each dim with several groups, fastest first."""
    counts = {"in": 0, "over": 0}
    styles = {}
    for dim in reversed(range(len(layout.sizes))):
        if 1 < layout.sizes[dim] < layout.world_size:
            name = "over" if layout.crosses_nodes(layout.group(dim, 0)) else "in"
            styles[dim] = name + _NTH[min(counts[name], len(_NTH) - 1)]
            counts[name] += 1
    return styles


def _outline(style: str, x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle, or its corners for the second dim among those within nodes."""
    if style == "in second":
        return svg.corners(x, y, width, height)
    return svg.rect(x, y, width, height, ' rx="4"')


def _outlines(layout: Layout, sheet: Sheet) -> Iterator[str]:
    """Outline the groups of rank 0, which show the pattern; lines would be too many."""
    for place, (dim, style) in enumerate(_outline_styles(layout).items()):
        drawn = [rank for rank in layout.group(dim, 0) if rank in sheet.corners]
        about = f"{layout.dim_labels[dim]}: group of rank 0"
        yield f'<g class="marks"><g class="{style}"><title>{svg.words(about)}</title>'
        for rank in drawn[1:] if place else drawn:  # rank 0 is in all of these groups
            x, y = sheet.corners[rank]
            width, height = sheet.cell_width + 3, sheet.cell_height + 3
            yield _outline(style, x - 1.5, y - 1.5, width, height)
        yield "</g></g>"
    if sheet.gap is not None:
        x, y = sheet.gap
        yield "".join(
            f'<circle class="dot" cx="{svg.number(x + 9 * at)}" cy="{svg.number(y)}" r="2.2"/>'
            for at in (-1, 0, 1)
        )
