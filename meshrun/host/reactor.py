"""One loop for whoever waits: for descriptors, for times, and for parts that look in every turn.

A turn waits until something is ready or due, and then calls what is ready, all that looks in every
turn, and what is due, in this order.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import time
from collections.abc import Callable, Collection
from selectors import EVENT_READ, EVENT_WRITE
from typing import Protocol

Call = Callable[[], object]
_LONGEST_WAIT_S = 1800.0
"""The kernel refuses one of months; a turn in which nothing is due does no harm."""


class HasFileno(Protocol):
    """What a descriptor belongs to."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


class Timer:
    """A call at a time, which may be moved or cancelled."""

    __slots__ = ("_call", "_reactor", "at_ns", "skips")

    def __init__(self, reactor: Reactor, at_ns: int | None, call: Call, *, skips: bool) -> None:
        self._reactor, self._call, self.skips = reactor, call, skips
        self.at_ns: int | None = None
        """When the call comes; ``None`` once it has, or will not."""
        self.move(at_ns)

    def move(self, at_ns: int | None) -> None:
        """Call at this time instead; ``None`` cancels it, until it is moved again."""
        if at_ns is not None and at_ns != self.at_ns:
            self._reactor.push(at_ns, self)
        self.at_ns = at_ns

    def restart(self, seconds: float) -> None:
        """Call so long from now instead."""
        self.move(self._reactor.now_ns() + int(seconds * 1e9))

    def cancel(self) -> None:
        """Do not call."""
        self.at_ns = None

    def expire(self, now_ns: int) -> None:
        """Call, if it is due."""
        if self.at_ns is not None and self.at_ns <= now_ns:
            self.at_ns = None
            self._call()


class Reactor:
    """A selector, a clock and a heap of timers.

    Args:
        clock_ns: Returns the time; the machine's monotonic clock unless a test has one of its own.
        selector: For descriptors that the system's best does not take: regular files.
    """

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int] | None = None,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self._clock_ns = clock_ns
        self._selector = selector or selectors.DefaultSelector()
        self._ready: list[tuple[selectors.SelectorKey, int]] = []
        self._each_turn: list[Call] = []
        self._dues: list[Callable[[], int | None]] = []
        self._skips: list[Callable[[int], object]] = []
        self._heap: list[tuple[int, int, Timer]] = []
        """One entry for each time that a timer was moved to; it counts while that still holds."""
        self._order = itertools.count()
        self.asleep_ns = self.due_ns = self.now_ns()
        """When the last wait began, and when it was to end at the latest."""

    def now_ns(self) -> int:
        """Return the time."""
        return time.monotonic_ns() if self._clock_ns is None else self._clock_ns()

    # ---- descriptors -----------------------------------------------------------------------

    def add_reader(self, fileobj: int | HasFileno, call: Call) -> None:
        """Call when there is something to read; one for both directions is called once a turn."""
        self._set(fileobj, EVENT_READ, call)

    def add_writer(self, fileobj: int | HasFileno, call: Call) -> None:
        """Call when there is room to write."""
        self._set(fileobj, EVENT_WRITE, call)

    def remove_writer(self, fileobj: int | HasFileno) -> None:
        """Do not wait for room any more; no effect if nobody does."""
        with contextlib.suppress(KeyError):
            calls = self._selector.get_key(fileobj).data
            if calls.pop(EVENT_WRITE, None) is None:
                return
            if calls:
                self._selector.modify(fileobj, EVENT_READ, calls)
            else:
                self._selector.unregister(fileobj)

    def remove(self, fileobj: int | HasFileno) -> None:
        """Watch it no more, closed or not; no effect if it is not watched."""
        with contextlib.suppress(KeyError, ValueError):  # a closed one is looked up by its object
            self._selector.unregister(fileobj).data.clear()

    @property
    def watched(self) -> Collection[int | HasFileno]:
        """All that is watched."""
        return [key.fileobj for key in self._selector.get_map().values()]

    def _set(self, fileobj: int | HasFileno, event: int, call: Call) -> None:
        try:
            key = self._selector.get_key(fileobj)
        except KeyError:
            self._selector.register(fileobj, event, {event: call})
            return
        key.data[event] = call
        if not key.events & event:
            self._selector.modify(fileobj, key.events | event, key.data)

    # ---- times -----------------------------------------------------------------------------

    def call_at(self, at_ns: int | None, call: Call, *, skips: bool = True) -> Timer:
        """Call once at a time, or when the timer is moved to one.

        Args:
            at_ns: When; ``None`` for not yet.
            call: What to call.
            skips: Whether :meth:`skip` moves it, as what limits how long others may take.
        """
        return Timer(self, at_ns, call, skips=skips)

    def call_later(self, seconds: float, call: Call) -> Timer:
        """Call once after so long."""
        return self.call_at(self.now_ns() + int(seconds * 1e9), call)

    def every(self, seconds: float, call: Call) -> Timer:
        """Call in the next turn, and again so long after each call; time is never skipped."""

        def again() -> None:
            timer.restart(seconds)
            call()

        timer = self.call_at(self.now_ns(), again, skips=False)
        return timer

    def each_turn(self, call: Call, *, due: Callable[[], int | None] | None = None) -> None:
        """Call in every turn, after what was ready, in the order in which this was asked for.

        Args:
            call: What to call.
            due: Returns when there is to be a turn at the latest, for what cannot know before.
        """
        self._each_turn.append(call)
        if due is not None:
            self.wake_by(due)

    def wake_by(self, due: Callable[[], int | None]) -> None:
        """Have a turn by the time that ``due`` returns, whoever does something in it."""
        self._dues.append(due)

    def on_skip(self, call: Callable[[int], object]) -> None:
        """Call with each time that is not to count."""
        self._skips.append(call)

    def push(self, at_ns: int, timer: Timer) -> None:
        """For :class:`Timer`: look at it at this time."""
        heapq.heappush(self._heap, (at_ns, next(self._order), timer))

    def skip(self, lost_ns: int) -> None:
        """Do not count this time: move what is to come."""
        for timer in dict.fromkeys(timer for _, _, timer in sorted(self._heap)):
            if timer.skips and timer.at_ns is not None:
                timer.move(timer.at_ns + lost_ns)
        for skip in self._skips:
            skip(lost_ns)

    @property
    def next_ns(self) -> int | None:
        """When there is to be a turn at the latest."""
        while self._heap and self._heap[0][2].at_ns != self._heap[0][0]:
            heapq.heappop(self._heap)
        times = [due() for due in self._dues]
        times.append(self._heap[0][0] if self._heap else None)
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    # ---- turns -----------------------------------------------------------------------------

    def wait(self, *, least_s: float = 0.0, most_s: float | None = None) -> None:
        """Wait until something is ready or due, but at least and at most so long."""
        next_ns, self.asleep_ns = self.next_ns, self.now_ns()
        timeout_s = most_s
        if next_ns is not None:
            until_s = max(least_s, (next_ns - self.asleep_ns) / 1e9)
            timeout_s = until_s if most_s is None else min(until_s, most_s)
        if timeout_s is not None:
            timeout_s = min(timeout_s, _LONGEST_WAIT_S)
        self._ready = self._selector.select(timeout_s)
        awake_ns = self.now_ns()
        latest_ns = awake_ns if timeout_s is None else self.asleep_ns + int(timeout_s * 1e9)
        self.due_ns = min(awake_ns, latest_ns)

    def call_ready(self) -> None:
        """Call what was ready, unless it was removed meanwhile."""
        ready, self._ready = self._ready, []
        for key, events in ready:
            called: Call | None = None
            for event in (EVENT_READ, EVENT_WRITE):
                call = key.data.get(event) if events & event else None
                if call is not None and call != called:
                    called = call
                    call()

    def call_due(self) -> None:
        """Call all that looks in every turn, and then what is due."""
        for call in self._each_turn:
            call()
        now_ns, due = self.now_ns(), []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, timer = heapq.heappop(self._heap)
            if timer.at_ns == at_ns:  # else it was moved, and has another place in the order
                due.append(timer)
        for timer in due:
            timer.expire(now_ns)

    def turn(self, *, most_s: float | None = None) -> None:
        """Wait until something is ready or due, and do it."""
        self.wait(most_s=most_s)
        self.call_ready()
        self.call_due()

    def poll(self, timeout_s: float | None) -> int:
        """Wait for descriptors alone, and call what is ready; return how many were."""
        self._ready = self._selector.select(timeout_s)
        count = len(self._ready)
        self.call_ready()
        return count

    def run_until(self, done: Callable[[], object], *, timeout_s: float | None = None) -> None:
        """Take turns until something holds, or for so long."""
        end = self.call_at(None, lambda: None)
        if timeout_s is not None:
            end.restart(timeout_s)
        while not done() and (timeout_s is None or end.at_ns is not None):
            self.turn()
        end.cancel()

    def close(self) -> None:
        """Call nothing more; what was watched is the callers' to close."""
        for key in (self._selector.get_map() or {}).values():
            key.data.clear()
        self._selector.close()
        self._each_turn.clear()
        self._heap.clear()

    def __enter__(self) -> Reactor:
        """Return it, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
