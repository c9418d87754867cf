"""The report of ``--check`` as text, JSON or a picture.

The text has a table of the dims, the findings, and the hosts that passed. The picture has a map of
the links and one for each dim; nodes and ranks are arranged as in a picture of the layout. The
color scale of a map is logarithmic, from its slowest rank to its fastest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import median

from msgspec import Struct

from meshrun.check.evaluate import (
    CheckResult,
    Finding,
    LinkRates,
    best_bus,
    failed_hosts,
    format_rate,
    format_size,
    group_rates,
)
from meshrun.layout import Layout
from meshrun.protocol.packing import to_builtins
from meshrun.report.svg import HEAD, RAMP_SWATCHES, SWATCH, boxes, cell, page
from meshrun.report.svg_geometry import MARGIN, Sheet, arrange
from meshrun.report.svg_style import PLAIN, RAMP_STEPS, Drawing, number, rect
from meshrun.wording import columns, count

_HEADER = ("DIM", "OPERATION", "SIZE", "MIN", "MEDIAN", "MAX", "BUS", "SLOWEST GROUP")
_SHARED_CORES = "ranks share cores, so their speeds are not compared"
_ROW = 18.0
_SPREAD = 1.5
"""The least ratio of speeds that a color scale covers, so that similar speeds look similar."""
_RED = "red: less than half the usual bandwidth, on one link or on all of a node or rank"
_STYLE = """
<style>.meshrun .slow,.meshrun .slow rect{fill:none;stroke:#e5484d;stroke-width:2.5}</style>"""
_Places = Mapping[int, tuple[float, float, float, float]]
"""Left, top, width and height."""


def _name_findings(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, or one that says there is none."""
    return [f"found: {finding.text}" for finding in findings] or ["found nothing wrong"]


def render_check(result: CheckResult) -> str:
    """Return the result as text."""
    measured, layout, findings = result.measured, result.layout, result.findings
    lines = [f"checked {count(layout.world_size, 'rank')} on {count(layout.nnodes, 'node')}"]
    if result.rows:
        lines += ["", *_table(result)]
    missing = {each.partition(":")[0] for rank in measured.ranks for each in rank.unsupported}
    if missing:
        names = ", ".join(sorted(missing))
        lines += ["", f"not measured, because the backend does not support it: {names}"]
    if best := best_bus(result.rows):
        shown = ", ".join(f"{dim} {format_rate(rate)}" for dim, rate in best.items())
        lines += ["", f"slowest group of each dim, all_reduce at its best size: {shown}"]
    if measured.shares_cores:
        lines += ["", _SHARED_CORES]
    lines.append("")
    lines += _name_findings(findings)
    failed = failed_hosts(findings)
    passed = Counter(rank.host for rank in measured.ranks if rank.host not in failed)
    if failed and passed:
        hostfile = (f"  {host} slots={ranks}" for host, ranks in passed.items())
        lines += ["", "hosts that passed:", *hostfile]
    return "\n".join(lines)


def render_check_json(result: CheckResult) -> str:
    """Return the result as JSON."""
    failed = failed_hosts(result.findings)
    hosts = dict.fromkeys(rank.host for rank in result.measured.ranks)
    document = {
        "schema": {"name": "meshrun.check", "version": 1},
        "passed": not result.findings,
        "hosts": {"passed": [host for host in hosts if host not in failed], "failed": failed},
        "findings": to_builtins(result.findings),
        "dims": to_builtins(result.rows),
        "ranks": to_builtins(result.measured.ranks),
    }
    return json.dumps(document, indent=2)


def _table(result: CheckResult) -> list[str]:
    cells: list[tuple[str, ...]] = [_HEADER]
    for row in result.rows:
        times = (f"{seconds * 1e3:.3f} ms" for seconds in row.seconds)
        slowest = ",".join(map(str, row.slowest[:6])) + (",..." if len(row.slowest) > 6 else "")
        if len(row.slowest) == result.layout.world_size:
            slowest = ""  # the only group
        cells.append(
            (row.dim, row.op, format_size(row.bytes), *times, format_rate(row.bus), slowest)
        )
    return columns(cells, right=range(2, 7))


# ---- the picture ---------------------------------------------------------------------------


class _Map(Struct, frozen=True):
    """The ranks, colored by one kind of speed."""

    title: str
    rates: Mapping[int, float]
    """Bytes per second of each rank that was measured."""
    links: LinkRates | None = None
    """Links, of which the slow ones are drawn."""

    @property
    def ends(self) -> tuple[float, float]:
        """The speeds at the ends of the color scale."""
        most = max(self.rates.values())
        return min(*self.rates.values(), most / _SPREAD), most

    @property
    def unit(self) -> tuple[str, float]:
        """The unit in which cells show speeds, and its value in bytes per second."""
        return ("GB/s", 1e9) if self.ends[1] >= 1e9 else ("MB/s", 1e6)

    def color(self, rank: int) -> str:
        """Return the class of a rank's cell."""
        if rank not in self.rates:
            return PLAIN
        least, most = self.ends
        return _step(log(self.rates[rank] / least) / log(most / least))

    def show(self, rate: float) -> str:
        """Return a speed in that unit, with at most two decimals: ``0.71``."""
        amount = rate / self.unit[1]
        return f"{amount:.{0 if amount >= 10 else 1 if amount >= 1 else 2}f}"


def render_check_svg(result: CheckResult) -> str:
    """Return the result as a self-contained SVG."""
    measured, layout, findings = result.measured, result.layout, result.findings
    hosts = {layout.node_rank(rank.rank): rank.host for rank in measured.ranks}
    drawing, top = Drawing(), HEAD + 8
    for each in (_links(result), *_dims(result)):
        if each.rates:
            top = _draw(drawing, each, layout, hosts, top)
    head = (
        f"check of {layout.mesh}: {count(layout.world_size, 'rank')} on"
        f" {count(layout.nnodes, 'node')}"
    )
    lines = [*[_SHARED_CORES] * measured.shares_cores, *_name_findings(findings)]
    for line in lines:
        drawing.text(MARGIN, top + 12, line, "soft")
        top += _ROW
    return page(head, ". ".join(lines), drawing, bottom=top, more_styles=_STYLE)


def _links(result: CheckResult) -> _Map:
    medians = {
        each.rank: median(exchange.bytes / exchange.seconds for exchange in each.exchanges)
        for each in result.measured.ranks
        if each.exchanges
    }
    between = "nodes" if result.layout.nnodes > 1 else "ranks"
    title = f"links between {between}, the median of each rank"
    return _Map(title, medians, result.links)


def _dims(result: CheckResult) -> Iterator[_Map]:
    largest = {row.dim: row.bytes for row in result.rows if row.op == "all_reduce"}
    for dim, length in largest.items():
        title = f"{dim}, bus bandwidth of each group in all_reduce of {format_size(length)}"
        rates = group_rates(result.measured, result.layout, dim, length)
        yield _Map(title, {rank: rate for group, rate in rates for rank in group})


def _draw(
    drawing: Drawing, shown: _Map, layout: Layout, hosts: Mapping[int, str], top: float
) -> float:
    """Draw a map that starts at ``top``, and return its bottom edge."""
    sheet = arrange(Layout(mesh=None, nproc_per_node=layout.nproc_per_node), top + 2 * _ROW + 6)
    drawing.text(MARGIN, top + 12, f"{shown.title}, in {shown.unit[0]}")
    _draw_key(drawing, shown, top + _ROW)
    drawing.add(*boxes(sheet, hosts), "<g>" if sheet.detailed else '<g class="small">')
    corners: dict[int, tuple[float, float]] = {}
    for box in sheet.boxes:
        for place, unplaced in enumerate(box.ranks):  # numbered node by node
            rank = layout.rank_at(box.number, place)
            corners[rank] = sheet.corners[unplaced]
            rate = shown.rates.get(rank)
            title = f"rank {rank}: {'not measured' if rate is None else format_rate(rate)}"
            detail = "" if rate is None else shown.show(rate)
            color = shown.color(rank)
            drawing.add(cell(sheet, corners[rank], color, title, label=rank, detail=detail))
    drawing.add("</g>")
    bottom, right = max(box.y + box.height for box in sheet.boxes), sheet.right
    if shown.links is not None and shown.links.slow:
        places = _places(layout, sheet, corners)
        drawing.add(*_bad_ends(shown.links, places), *_arcs(shown.links, places, sheet))
        bottom, right = bottom + 30, right + 44
        drawing.text(MARGIN, bottom, _RED, "soft")
    drawing.right = max(drawing.right, right)
    return bottom + 22


def _places(layout: Layout, sheet: Sheet, corners: Mapping[int, tuple[float, float]]) -> _Places:
    """Return the places of what links connect: nodes, or the ranks of a single node."""
    if layout.nnodes > 1:
        return {box.number: (box.x, box.y, box.width, box.height) for box in sheet.boxes}
    return {rank: (x, y, sheet.cell_width, sheet.cell_height) for rank, (x, y) in corners.items()}


def _bad_ends(links: LinkRates, places: _Places) -> Iterator[str]:
    for unit in links.bad_ends:
        if unit in places:
            x, y, width, height = places[unit]
            outline = rect(x - 2, y - 2, width + 4, height + 4, ' rx="7"')
            yield f'<g class="slow">{outline}</g>'


def _arcs(links: LinkRates, places: _Places, sheet: Sheet) -> Iterator[str]:
    """Yield the slow links between good ends: below ranks in a line, beside ranks in rows."""
    bad = set(links.bad_ends)
    for pair in sorted(links.slow, key=sorted):
        one, other = sorted(pair)
        if bad & pair or not places.keys() >= pair:
            continue
        (x1, y1, width, height), (x2, y2, *_) = places[one], places[other]
        if y1 == y2:
            across, down = width / 2, height
            bend = (x1 + x2 + width) / 2, y1 + height + 36
        else:
            across, down = width, height / 2
            bend = max(x1, x2) + width + (76 if sheet.arrangement == "rows" else 30), (y1 + y2) / 2
        places_on_arc = (x1 + across, y1 + down, *bend, x2 + across, y2 + down)
        path = "M{} {}Q{} {} {} {}".format(*map(number, places_on_arc))
        about = f"{one} and {other}: {format_rate(links.rates[pair])}"
        yield f'<path class="slow" d="{path}"><title>{about}</title></path>'


def _draw_key(drawing: Drawing, shown: _Map, y: float) -> None:
    least, most = map(shown.show, shown.ends)
    x = drawing.text(MARGIN, y + 12, least, "soft") + 6
    for swatch in range(RAMP_SWATCHES):
        name = _step(swatch / (RAMP_SWATCHES - 1))
        drawn = rect(x + swatch * SWATCH, y + 1, SWATCH, SWATCH)
        drawing.add(f'<g class="cell {name}">{drawn}</g>')
    drawing.text(x + RAMP_SWATCHES * SWATCH + 6, y + 12, most, "soft")


def _step(part: float) -> str:
    return f"r{round(part * (RAMP_STEPS - 1))}"
