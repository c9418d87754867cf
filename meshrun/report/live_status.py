"""The live view of ``--status``: samples the ranks periodically and shows their state."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from meshrun.console.console import Console
from meshrun.host.gpu_state import read_gpu_memory
from meshrun.host.nvml import Driver
from meshrun.host.reactor import Reactor
from meshrun.host.usage import Usage, usage_of_trees
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.result import LaunchResult
from meshrun.report.rank_status import RankStatus, Status, phase_of
from meshrun.report.status_view import draw_panel, summarize
from meshrun.supervisor.watcher import Watcher

_NS = 1_000_000_000
_PANEL_INTERVAL_S, _LINES_INTERVAL_S = 1.0, 30.0
_CHANGE_DELAY_NS = 100_000_000
"""How soon a change of phases is shown."""
_MIN_PAUSE = 20
"""The pause after a sample, as a multiple of its duration: the process table may be long."""


class LiveStatus(Watcher):
    """Shows the state of the ranks: in a panel on a terminal, as lines elsewhere."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._console = console
        self._driver = Driver(console.note)
        self._gpu_bytes: dict[int, int] = {}
        self.update_plan(plan)
        self._on_panel = console.can_show_panel
        default_s = _PANEL_INTERVAL_S if self._on_panel else _LINES_INTERVAL_S
        self._interval_ns = int((plan.request.status_interval_s or default_s) * _NS)
        self._began_ns = self._sampled_ns = time.monotonic_ns()
        self._next_sample_ns = self._began_ns + (0 if self._on_panel else self._interval_ns)
        self._used: dict[int, Usage] = {}
        self._cores: dict[int, float] = {}

    def begin(self, reactor: Reactor, state: State) -> None:
        """Start to show the state."""
        self._state = state
        self._timer = reactor.call_at(self._next_sample_ns, self._show, skips=False)

    def on_event(self, event: Event, state: State) -> None:  # noqa: ARG002
        """Update a panel soon if the state has changed."""
        if self._on_panel and state is not self._state:
            soon_ns = time.monotonic_ns() + _CHANGE_DELAY_NS
            self._timer.move(min(self._timer.at_ns or soon_ns, soon_ns))
        self._state = state

    def end(self, state: State, result: LaunchResult) -> None:  # noqa: ARG002
        """Stop waiting for the GPUs' driver."""
        self._driver.close()

    def _show(self) -> None:
        state, now_ns = self._state, time.monotonic_ns()
        if state.over:
            return
        if now_ns >= self._next_sample_ns:
            self._sample(state, now_ns)
            took_ns = time.monotonic_ns() - now_ns
            self._next_sample_ns = now_ns + max(self._interval_ns, _MIN_PAUSE * took_ns)
            gpus = self.plan.used_gpus if self._used else ()
            self._gpu_bytes = read_gpu_memory(self._driver, gpus)
        self._timer.move(self._next_sample_ns)
        status = self._status(state, now_ns)
        if self._on_panel:
            with suppress(OSError):  # the terminal hung up
                size = os.get_terminal_size(2)
                lines = draw_panel(self.plan.layout, status, size.columns - 1, size.lines)
                self._console.set_panel(lines)
        else:
            self._console.note(f"status: {summarize(status)}")

    def _sample(self, state: State, now_ns: int) -> None:
        pids = [rank.pid for rank in state.ranks.values() if rank.pid and not rank.exited]
        used = usage_of_trees(pids) if pids else {}
        seconds = (now_ns - self._sampled_ns) / _NS
        self._cores = {
            pid: max(0.0, use.cpu_s - self._used[pid].cpu_s) / seconds
            for pid, use in used.items()
            if pid in self._used and seconds > 0
        }
        self._used, self._sampled_ns = used, now_ns

    def _status(self, state: State, now_ns: int) -> Status:
        has_mesh = self.plan.layout.mesh is not None
        ranks = []
        for rank, rank_state in state.ranks.items():
            phase = phase_of(rank_state, state, has_mesh=has_mesh)
            used = self._used.get(rank_state.pid or 0)
            if rank_state.exited is not None or used is None:
                ranks.append(RankStatus(rank=rank, phase=phase))
                continue
            ranks.append(
                RankStatus(
                    rank=rank,
                    phase="stopped" if used.stopped else phase,
                    cpu=self._cores.get(rank_state.pid or 0),
                    memory_bytes=used.memory_bytes,
                    gpu_bytes=self._gpu_bytes.get(self.plan.layout.local_rank(rank)),
                )
            )
        return Status(
            ranks=tuple(ranks),
            generation=state.generation,
            max_restarts=state.max_restarts,
            elapsed_s=(now_ns - self._began_ns) / _NS,
        )
