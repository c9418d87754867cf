"""Detects a slow start, and ranks that no longer make progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshrun.host.process_state import is_traced
from meshrun.lifecycle.state import State
from meshrun.protocol.activity import Activity

_LEAST_CPU = 0.02
"""Share of a core that counts as work: a rank that waits in gloo uses 0.6 % (measured)."""
_LEAST_S = 0.03
"""CPU time that counts as work at all: the kernel counts it in ticks of 10 ms."""
_NS = 1_000_000_000


class Watchdog:
    """Checks ranks periodically, if the user has set limits.

    Args:
        start_timeout_s: How long all ranks may take to start the program; 0 for no limit.
        hang_timeout_s: How long all ranks may make no progress; 0 for no limit.
        now_ns: Returns the time.
        cpu_seconds: Returns the CPU time of each process, including its descendants.
        is_held_up: Returns whether ranks may wait for the user, or for a slow reader of our output.
    """

    def __init__(
        self,
        *,
        start_timeout_s: float,
        hang_timeout_s: float,
        now_ns: Callable[[], int],
        cpu_seconds: Callable[[Iterable[int]], dict[int, float]],
        is_held_up: Callable[[], bool],
    ) -> None:
        self._start_timeout_ns = int(start_timeout_s * _NS)
        self._hang_timeout_ns = int(hang_timeout_s * _NS)
        self._every_ns = min(max(self._hang_timeout_ns // 8, _NS // 20), 10 * _NS)
        self._now_ns, self._cpu_seconds, self._is_held_up = now_ns, cpu_seconds, is_held_up
        self.activity = Activity()
        """Shared with the other nodes, if there are any."""
        self.begin()

    def begin(self) -> None:
        """Start over, with a new generation."""
        now_ns = self._now_ns()
        self._began_ns = self._active_ns = now_ns
        self._reported_stall = False
        self._checked_ns = 0
        self._spent: dict[int, float] = {}
        """CPU time of each rank at the last check that found one working."""
        self._beating: set[int] = set()
        """Ranks whose program reports progress."""
        self._places: dict[int, str] = {}
        """The last answer of each rank: where in a collective it waits."""
        self._waiting: set[int] = set()
        """Ranks that made no progress in a collective between the last two checks."""

    def beat(self, rank: int) -> None:
        """Record that a rank's program reported progress."""
        self._beating.add(rank)
        self._active_ns = self._now_ns()

    def record_output(self, rank: int) -> None:
        """Record that a rank printed something."""
        if self._hang_timeout_ns and rank not in self._beating:
            self._active_ns = self._now_ns()

    def record_wait(self, rank: int, place: str) -> None:
        """Take a rank's answer where it waits in a collective; "" if it does not wait.

        A rank that is still at the same place used its CPU only to wait: NCCL spins.
        """
        if place and self._places.get(rank) == place:
            self._waiting.add(rank)
        self._places[rank] = place

    def must_ask_waits(self, state: State) -> bool:
        """Return whether to ask now which ranks wait in a collective, for the next check."""
        return self._is_due(state) and _all_began(state)

    def skip(self, lost_ns: int) -> None:
        """Do not count time in which this process, and perhaps the ranks, did not run."""
        now_ns = self._now_ns()
        self._began_ns += lost_ns
        self._active_ns = min(now_ns, self._active_ns + lost_ns)
        if self._checked_ns:
            self._checked_ns += lost_ns
        self.activity.skip(lost_ns, now_ns)

    def next_check_ns(self, state: State) -> int | None:
        """Return when to check next, or ``None`` not to."""
        if state.stopping or state.over or state.begin_ns is not None:
            return None
        if not _all_began(state):
            may_stall = self._start_timeout_ns and not self._reported_stall
            return self._began_ns + self._start_timeout_ns if may_stall else None
        return self._checked_ns + self._every_ns if self._hang_timeout_ns else None

    def must_report_stall(self, state: State) -> bool:
        """Return whether to report now that the start is slow; once per generation."""
        if not self._is_due(state) or _all_began(state):
            return False
        self._reported_stall = True
        return True

    def hung_for_s(self, state: State) -> float | None:
        """Decide whether the ranks hang: return how long none has made progress, or ``None``."""
        if not self._is_due(state) or not _all_began(state):
            return None
        now_ns = self._now_ns()
        if self._checked_ns == 0 or self._some_worked(state, now_ns):
            self._active_ns = now_ns
        self._checked_ns = now_ns
        self.activity.here_ns = self._active_ns
        idle_ns = now_ns - max(self._active_ns, self.activity.elsewhere_ns or 0)
        return idle_ns / _NS if idle_ns >= self._hang_timeout_ns else None

    def _is_due(self, state: State) -> bool:
        next_check_ns = self.next_check_ns(state)
        return next_check_ns is not None and self._now_ns() >= next_check_ns

    def _some_worked(self, state: State, now_ns: int) -> bool:
        excepted = self._beating | self._waiting
        pids = [pid for rank, pid in state.alive.items() if rank not in excepted]
        self._waiting.clear()
        spent = self._cpu_seconds(pids) if pids else {}
        least_s = _LEAST_S + _LEAST_CPU * (now_ns - self._active_ns) / _NS
        worked = any(
            seconds - self._spent.get(pid, 0.0) > least_s for pid, seconds in spent.items()
        )
        if worked:
            self._spent = spent
        return worked or self._is_held_up() or any(map(is_traced, state.alive.values()))


def _all_began(state: State) -> bool:
    return all(
        rank_state.ready or rank_state.exited is not None for rank_state in state.ranks.values()
    )
