"""A layout as a picture: nodes as boxes, ranks as cells coloured by a dim, groups as lines."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from meshrun.errors import UsageError
from meshrun.layout import Layout
from meshrun.report.svg_geometry import (
    MARGIN,
    Sheet,
    arrange,
)
from meshrun.report.svg_groups import summarize
from meshrun.report.svg_links import LEGEND_ROW, draw_legend, draw_links, legend_size
from meshrun.report.svg_style import (
    CATEGORIES,
    color_class,
    coordinate_text,
    node_label,
    number,
    rect,
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


def choose_color_dim(layout: Layout, asked: str | None) -> int | None:
    """Return the dim that colours the ranks: the one asked for, else the slowest.

    Args:
        layout: Whose ranks are coloured.
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
        hint=f"it has {', '.join(f'`{name}`' for name in known)}",
    )


def render_svg(layout: Layout, *, color_dim: int | None = None) -> str:
    """Return a layout as an SVG that needs nothing beside itself.

    Args:
        layout: What to draw.
        color_dim: The dim whose index gives a rank its colour; ``None`` for one colour.

    Example:
        >>> render_svg(Layout(mesh=None, nproc_per_node=(2,)))[:4]
        '<svg'
    """
    dims = summarize(layout)
    has_key = color_dim is not None
    sheet = arrange(layout, _HEAD + (_KEY if has_key else 0) + 8)
    classes = {rank: _class(layout, rank, color_dim) for rank in sheet.corners}
    head = _headline(layout)
    notes = _left_out(layout, sheet)
    legend_width, legend_height = legend_size(layout, sheet, dims)
    legend_top = sheet.bottom + 28
    below = legend_top + legend_height
    last_line = below + len(notes) * LEGEND_ROW - LEGEND_ROW if dims or notes else sheet.bottom
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
        *_boxes(sheet),
        *(draw_links(layout, sheet) if sheet.arrangement != "grid" else ()),
        *_cells(layout, sheet, classes),
        *(draw_links(layout, sheet) if sheet.arrangement == "grid" else ()),
        *draw_legend(layout, sheet, dims, legend_top),
        *(text(MARGIN, below + row * LEGEND_ROW, note, "soft") for row, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _headline(layout: Layout) -> str:
    mesh = str(layout.mesh) if layout.mesh else "no mesh"
    least, most = min(layout.nproc_per_node), max(layout.nproc_per_node)
    each = f"{least:,}" if least == most else f"{least:,}-{most:,}"
    return (
        f"{mesh}: {count(layout.world_size, 'rank')} on {count(layout.nnodes, 'node')}"
        f" \u00d7 {each} worker{plural(most)}"
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


# ---- colours -------------------------------------------------------------------------------


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
    """Return what says which colour is which index, and where it ends."""
    size = layout.sizes[dim]
    y = _HEAD + _KEY / 2
    lead = f"colour: index in {layout.dim_labels[dim]}"
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


def _boxes(sheet: Sheet) -> Iterator[str]:
    for box in sheet.boxes:
        yield rect(box.x, box.y, box.width, box.height, ' class="box" rx="6"')
        middle = sheet.cell_height / 2 + 12 if sheet.arrangement == "rows" else 14
        yield text(box.x + 8, box.y + middle, node_label(box.node), "soft")


def _cells(layout: Layout, sheet: Sheet, classes: dict[int, str]) -> Iterator[str]:
    yield "<g>" if sheet.detailed else '<g class="small">'
    size = f'width="{number(sheet.cell_width)}" height="{number(sheet.cell_height)}" rx="3"'
    half = sheet.cell_width / 2
    named = layout.dim_labels
    with_coordinate = sheet.detailed and bool(layout.sizes)
    baseline = 16.0 if with_coordinate else sheet.cell_height / 2 + (4.6 if sheet.detailed else 3.2)
    for box in sheet.boxes:
        for rank in box.ranks:
            x, y = sheet.corners[rank]
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
