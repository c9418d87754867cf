"""A status as lines: a grid of ranks if it fits, otherwise one line per phase."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshrun.layout import Layout
from meshrun.layout.labels import merged_label
from meshrun.report.rank_status import RankPhase, RankStatus, Status

_SHARE_OF_WINDOW = 3
_FEWEST_LINES = 4
_MOST_CELLS = 1024
_WIDE = 10_000
_STYLES: dict[RankPhase, str] = {
    "failed": "bold red",
    "hung": "bold yellow",
    "stopped": "yellow",
    "starting": "cyan",
    "joining": "cyan",
    "running": "green",
    "ending": "magenta",
    "ended": "dim",
}
"""In the order in which phases are listed, the worst first."""


def draw_panel(layout: Layout, status: Status, columns: int, rows: int) -> list[str]:
    """Return the lines of a panel for a window of this size; one plain line if it has none."""
    if not rows:  # as a terminal whose size nobody has set
        return [f"status: {summarize(status)}"]
    console = Console(
        file=io.StringIO(),
        width=max(columns, 1),
        force_terminal=True,
        color_system=None if os.environ.get("NO_COLOR") else "standard",
        legacy_windows=False,
    )
    most = max(_FEWEST_LINES, rows // _SHARE_OF_WINDOW)
    head = Text(f"-- {summarize(status)} --", style="bold")
    head.truncate(columns, overflow="ellipsis")
    with console.capture() as captured:
        console.print(head, no_wrap=True)
        body = _body(layout, status, console, columns, most - 1)
        console.print(body, no_wrap=True, width=_WIDE)  # cropped to the window, not squeezed
    lines = captured.get().splitlines()
    return lines[: max(1, min(most, rows - 2))]


def _body(layout: Layout, status: Status, console: Console, columns: int, lines: int) -> Table:
    if len(status.ranks) <= _MOST_CELLS:
        wide = console.options.update(width=_WIDE)
        for detail in (3, 2, 1):
            grid = _grid(layout, status, detail)
            fits = grid.row_count + 1 <= lines
            if fits and console.measure(grid, options=wide).maximum <= columns:
                return grid
    return _merged(layout, status)


def _grid(layout: Layout, status: Status, detail: int) -> Table:
    """Return a table with a cell for each rank, in a column for each index of the last dim."""
    sizes = layout.sizes or (layout.world_size,)
    names = layout.mesh_dim_names or ("",) * len(sizes)
    between = " " if any(names) else ","
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", style="dim")
    for index in range(sizes[-1]):
        table.add_column(f"{names[-1]}{index}", justify="right", no_wrap=True)
    known = {rank.rank: rank for rank in status.ranks}
    for row in range(math.prod(sizes[:-1])):
        ranks = range(row * sizes[-1], (row + 1) * sizes[-1])
        if any(rank in known for rank in ranks):
            cells = [_cell(known[rank], detail) if rank in known else "" for rank in ranks]
            outer = zip(names, layout.coordinate(ranks[0])[:-1], strict=False)
            label = between.join(f"{name}{index}" for name, index in outer)
            table.add_row(label if layout.sizes else "rank", *cells)
    return table


def _merged(layout: Layout, status: Status) -> Table:
    """Return a table with a line for each phase."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for phase, style in _STYLES.items():
        ranks = [rank for rank in status.ranks if rank.phase == phase]
        if ranks:
            who = merged_label(layout, (rank.rank for rank in ranks))
            cpu = _spread((rank.cpu for rank in ranks), lambda cores: f"{100 * cores:.0f} %")
            memory = _spread((rank.memory_bytes for rank in ranks), _size)
            table.add_row(Text(phase, style=style), who, cpu, memory)
    return table


def summarize(status: Status) -> str:
    """Return a status in one line."""
    counts = Counter(rank.phase for rank in status.ranks)
    parts = [f"{counts[phase]} {phase}" for phase in _STYLES if counts[phase]]
    if cores := [rank.cpu for rank in status.ranks if rank.cpu is not None]:
        parts.append(f"CPU {100 * sum(cores):.0f} %")
    if used := [rank.memory_bytes for rank in status.ranks if rank.memory_bytes is not None]:
        parts.append(f"memory {_size(sum(used))}")
    if used := [rank.gpu_bytes for rank in status.ranks if rank.gpu_bytes is not None]:
        parts.append(f"GPU memory {_size(sum(used))}")
    if status.generation:
        parts.append(f"restart {status.generation} of {status.max_restarts}")
    return ", ".join([*parts, _duration(status.elapsed_s)])


def _cell(rank: RankStatus, detail: int) -> Text:
    """Return a rank in a few characters, fewer with less detail."""
    if rank.phase not in ("running", "stopped") or rank.cpu is None or rank.memory_bytes is None:
        return Text(rank.phase if detail > 1 else rank.phase[:4], style=_STYLES[rank.phase])
    parts = [f"{100 * rank.cpu:.0f}%"] if rank.phase == "running" else [rank.phase[: 3 + detail]]
    parts += [_size(rank.memory_bytes)] if detail > 1 else []
    parts += [_size(rank.gpu_bytes)] if detail > 2 and rank.gpu_bytes is not None else []
    return Text(" ".join(parts), style=_STYLES[rank.phase])


def _spread(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """Return the mean of the known values, and their range if they differ."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    least, mean, most = (show(x) for x in (min(found), sum(found) / len(found), max(found)))
    return f"{mean} each" if least == most else f"{mean} each ({least} to {most})"


def _size(count: float) -> str:
    """Return a number of bytes in about three digits: ``1.2G``."""
    for unit in ("K", "M", "G"):
        count /= 1024
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit == "G" and count < 99.5 else f"{count:.0f}{unit}"
    return f"{count / 1024:.1f}T"


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
