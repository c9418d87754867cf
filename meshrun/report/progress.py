"""What a start is waiting for, on a terminal; and the first news of a failure, everywhere."""

from __future__ import annotations

import time

from meshrun.events import (
    Event,
    LeftoversEnded,
    RankExited,
    RankRaised,
    SignalArrived,
    ZygoteUnsafe,
)
from meshrun.report.failure import headline
from meshrun.result import signal_name, split_wait_status
from meshrun.supervise.console import Console
from meshrun.supervise.state import State


class StartProgress:
    """Watches a launch: a status line while it starts, a note when it begins to end."""

    def __init__(self, labels: dict[int, str], *, has_mesh: bool) -> None:
        self._labels = labels
        self._has_mesh = has_mesh
        self._began_ns = time.monotonic_ns()
        self._told = False
        self._started = False

    def __call__(self, event: Event, state: State, console: Console) -> None:
        """Take one event and the state after it."""
        if isinstance(event, ZygoteUnsafe):
            console.note(f"each rank gets its own interpreter, since {event.reason}")
        if isinstance(event, LeftoversEnded):
            what = "1 process" if event.count == 1 else f"{event.count} processes"
            console.note(f"{what} that ranks had left behind had to be ended")
        if state.stopping and not self._told:
            self._told = True
            console.set_status("")
            console.note(self._news(event, state))
        if console.shows_status and not state.stopping and not self._started:
            console.set_status(self._status(state))

    def _status(self, state: State) -> str:
        total = len(state.ranks)
        began = sum(known.pid is not None for known in state.ranks.values())
        joined = sum(known.joined for known in state.ranks.values())
        ready = sum(known.ready for known in state.ranks.values())
        elapsed = f"{(time.monotonic_ns() - self._began_ns) / 1e9:.1f} s"
        if ready == total:
            self._started = True
            return ""
        if not began:
            return "importing torch"
        if began < total:
            return f"started {began} of {total} ranks ({elapsed})"
        if self._has_mesh and joined < total:
            return f"{joined} of {total} ranks joined ({elapsed})"
        return f"{ready} of {total} ranks have their mesh ({elapsed})"

    def _news(self, event: Event, state: State) -> str:
        rest = len(state.alive)
        match event:
            case RankRaised(rank=rank):
                verb = "exits, saying" if event.kind == "SystemExit" else "raised"
                what = event.message if event.kind == "SystemExit" else headline(event)
                return f"{self._name(rank)} {verb} {what}{_ending_others(rest - 1)}"
            case RankExited(rank=rank, wait_status=status):
                code, signum = split_wait_status(status)
                end = f"ended by {signal_name(signum)}" if signum else f"exited with code {code}"
                return f"{self._name(rank)} {end}{_ending_others(rest)}"
            case SignalArrived(signum=signum):
                grace = f" within {state.shutdown_timeout_s:g} s" if rest else ""
                return f"{signal_name(signum)}: ending {rest} ranks{grace}"
            case _:
                return f"ending {rest} ranks"

    def _name(self, rank: int) -> str:
        label = self._labels.get(rank)
        return f"rank {rank} [{label}]" if label else f"rank {rank}"


def _ending_others(count: int) -> str:
    if count < 1:
        return ""
    return "; ending the other rank" if count == 1 else f"; ending the other {count} ranks"
