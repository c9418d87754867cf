"""The live view of ``--status``: samples the ranks periodically and shows their state.

On a terminal, a panel has a grid of ranks if it fits, otherwise one line per phase.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from meshrun.console.console import Console
from meshrun.host.gpu_state import read_gpu_memory
from meshrun.host.nvml import Driver
from meshrun.host.process_state import Usage, usage_of_trees
from meshrun.host.reactor import Reactor
from meshrun.layout import Layout
from meshrun.layout.labels import merged_label
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.result import LaunchResult
from meshrun.report.rank_status import RankPhase, phase_of
from meshrun.supervisor.watcher import Watcher

_PANEL_INTERVAL_S, _LINES_INTERVAL_S = 1.0, 30.0
_CHANGE_DELAY_S = 0.1
"""How soon a change of phases is shown."""
_MIN_PAUSE = 20
"""The pause after a sample, as a multiple of its duration: the process table may be long."""
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


class RankStatus(Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    phase: RankPhase
    cpu: float | None = None
    """Cores used since the last measurement; ``None`` before the second one."""
    memory_bytes: int | None = None
    gpu_bytes: int | None = None


class Status(Struct, frozen=True, kw_only=True):
    """The ranks of this node."""

    ranks: tuple[RankStatus, ...]
    generation: int
    max_restarts: int
    elapsed_s: float


class LiveStatus(Watcher):
    """Shows the state of the ranks: in a panel on a terminal, as lines elsewhere."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._console = console
        self._driver = Driver(console.note)
        self._gpu_bytes: dict[int, int] = {}
        self.update_plan(plan)
        self._on_panel = console.can_show_panel
        default_s = _PANEL_INTERVAL_S if self._on_panel else _LINES_INTERVAL_S
        self._interval_s = plan.request.status_interval_s or default_s
        self._used: dict[int, Usage] = {}
        self._cores: dict[int, float] = {}

    def begin(self, reactor: Reactor, state: State) -> None:
        """Start to show the state."""
        self._reactor, self._state = reactor, state
        self._began_s = self._sampled_s = reactor.now_s()
        self._drawing = reactor.call_at(None, self._draw, skips=False)
        self._sampling = reactor.call_at(None, self._sample, skips=False)
        self._sampling.restart(0.0 if self._on_panel else self._interval_s)

    def on_event(self, event: Event, state: State) -> None:  # noqa: ARG002
        """Update a panel soon if the state has changed."""
        if self._on_panel and state is not self._state and not self._drawing.is_pending:
            self._drawing.restart(_CHANGE_DELAY_S)
        self._state = state

    def end(self, state: State, result: LaunchResult) -> None:  # noqa: ARG002
        """Stop waiting for the GPUs' driver."""
        self._driver.close()

    def _sample(self) -> None:
        """Measure what the ranks use, and show it."""
        now_s, state = self._reactor.now_s(), self._state
        if state.over:
            return
        pids = [rank.pid for rank in state.ranks.values() if rank.pid and not rank.exited]
        used = usage_of_trees(pids) if pids else {}
        self._sampling.restart(max(self._interval_s, _MIN_PAUSE * (self._reactor.now_s() - now_s)))
        seconds = now_s - self._sampled_s
        self._cores = {
            pid: max(0.0, use.cpu_s - self._used[pid].cpu_s) / seconds
            for pid, use in used.items()
            if pid in self._used and seconds > 0
        }
        self._used, self._sampled_s = used, now_s
        self._gpu_bytes = read_gpu_memory(self._driver, self.plan.used_gpus if used else ())
        self._draw()

    def _draw(self) -> None:
        if self._state.over:
            return
        self._drawing.cancel()
        status = self._status(self._state)
        if self._on_panel:
            with suppress(OSError):  # the terminal hung up
                size = os.get_terminal_size(2)
                lines = draw_panel(self.plan.layout, status, size.columns - 1, size.lines)
                self._console.set_panel(lines)
        else:
            self._console.note(f"status: {summarize(status)}")

    def _status(self, state: State) -> Status:
        has_mesh = self.plan.layout.mesh is not None
        ranks = []
        for rank, rank_state in state.ranks.items():
            shown = RankStatus(rank=rank, phase=phase_of(rank_state, state, has_mesh=has_mesh))
            used = self._used.get(rank_state.pid or 0)
            if rank_state.exited is None and used is not None:
                shown = replace(
                    shown,
                    phase="stopped" if used.stopped else shown.phase,
                    cpu=self._cores.get(rank_state.pid or 0),
                    memory_bytes=used.memory_bytes,
                    gpu_bytes=self._gpu_bytes.get(self.plan.layout.local_rank(rank)),
                )
            ranks.append(shown)
        return Status(
            ranks=tuple(ranks),
            generation=state.generation,
            max_restarts=state.max_restarts,
            elapsed_s=self._reactor.now_s() - self._began_s,
        )


# ---- lines ---------------------------------------------------------------------------------


def draw_panel(layout: Layout, status: Status, columns: int, rows: int) -> list[str]:
    """Return the lines of a panel for a window of this size; one plain line if it has none."""
    if not rows:  # as a terminal whose size nobody has set
        return [f"status: {summarize(status)}"]
    console = RichConsole(
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


def _body(layout: Layout, status: Status, console: RichConsole, columns: int, lines: int) -> Table:
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
