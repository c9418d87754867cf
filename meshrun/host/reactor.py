"""An event loop for descriptors, timers, and functions to call in every turn.

A turn waits until something is ready or due. Then it calls the functions of ready descriptors,
those of every turn, and due timers, in this order.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Generator
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import Protocol, TypeVar

from meshrun.errors import HostError

T = TypeVar("T")
Call = Callable[[], object]
Steps = Generator[float, None, T]
"""Work in steps, between which others can be done; yields how long to wait before the next step, in
seconds, and returns the result."""
_STEP_S = 0.02
_LONGEST_WAIT_S = 1800.0
"""The kernel refuses to wait for months; a turn in which nothing is due does no harm."""


def finish(steps: Steps[T], wait: Callable[[float], object] = time.sleep) -> T:
    """Take all steps, one after the other, and return the result."""
    while True:
        try:
            wait_s = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        wait(wait_s)


class HasFileno(Protocol):
    """An object with a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


class Closable(HasFileno, Protocol):
    """An object with a descriptor that it can close."""

    def close(self) -> object:
        """Close it."""
        ...


class Timer:
    """A call at a certain time, which can be moved or cancelled."""

    __slots__ = ("_call", "_reactor", "at_ns", "skips")

    def __init__(self, reactor: Reactor, at_ns: int | None, call: Call, *, skips: bool) -> None:
        self._reactor, self._call, self.skips = reactor, call, skips
        self.at_ns: int | None = None
        """The time of the call; ``None`` if it has been made or cancelled."""
        self.move(at_ns)

    @property
    def is_pending(self) -> bool:
        """Whether the call is still to be made: its time is set, and has not come."""
        return self.at_ns is not None

    def move(self, at_ns: int | None) -> None:
        """Move the call to another time; ``None`` cancels it until it is moved again."""
        if at_ns is not None and at_ns != self.at_ns:
            self._reactor.push(at_ns, self)
        self.at_ns = at_ns

    def restart(self, seconds: float) -> None:
        """Move the call to a number of seconds from now."""
        self.move(self._reactor.now_ns() + int(seconds * 1e9))

    def cancel(self) -> None:
        """Cancel the call."""
        self.at_ns = None

    def expire(self, now_ns: int) -> None:
        """Make the call if it is due."""
        if self.at_ns is not None and self.at_ns <= now_ns:
            self.at_ns = None
            self._call()


class Reactor:
    """A selector, a clock and a heap of timers.

    Args:
        clock_ns: Returns the time; by default the monotonic clock. For tests.
        selector: A selector for what the default one does not support: epoll lacks regular files.
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
        self._deadlines: list[Callable[[], int | None]] = []
        self._skips: list[Callable[[int], object]] = []
        self._heap: list[tuple[int, int, Timer]] = []
        """An entry for each time to which a timer was moved, valid while it is the timer's time."""
        self._wakeup_pipe: tuple[int, ...] = ()
        self._order = itertools.count()
        self.asleep_ns = self.due_ns = self.now_ns()
        """When the last wait began, and when it should have ended at the latest."""
        self._counted_ns, self._waited_ns = self.now_ns(), 0
        """Until when lost time is counted, and how long waits since then should have taken."""

    def now_ns(self) -> int:
        """Return the time."""
        return time.monotonic_ns() if self._clock_ns is None else self._clock_ns()

    def now_s(self) -> float:
        """Return the time in seconds."""
        return self.now_ns() / 1e9

    # ---- descriptors -----------------------------------------------------------------------

    def add_reader(self, fileobj: int | HasFileno, call: Call) -> None:
        """Call when there is something to read; at most once per turn if it is the writer, too."""
        self._set(fileobj, EVENT_READ, call)

    def add_writer(self, fileobj: int | HasFileno, call: Call) -> None:
        """Call when there is room to write."""
        self._set(fileobj, EVENT_WRITE, call)

    def on_signal(self, call: Call) -> None:
        """Call after signals that have a Python handler, which may do nothing itself."""
        self._wakeup_pipe = woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)

        def take() -> None:
            os.read(woken, 4096)
            call()

        self.add_reader(woken, take)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def remove_writer(self, fileobj: int | HasFileno) -> None:
        """Stop waiting for room to write; do nothing if it is not being waited for."""
        with contextlib.suppress(KeyError, RuntimeError):  # the reactor may be closed
            calls = self._selector.get_key(fileobj).data
            if calls.pop(EVENT_WRITE, None) is None:
                return
            if calls:
                self._selector.modify(fileobj, EVENT_READ, calls)
            else:
                self._selector.unregister(fileobj)

    def remove(self, fileobj: int | HasFileno) -> None:
        """Stop watching, even if it is closed; do nothing if it is not being watched."""
        with contextlib.suppress(KeyError, ValueError):  # a closed one is found by its object
            self._selector.unregister(fileobj).data.clear()

    def drop(self, each: Closable | None) -> None:
        """Stop watching an object and close it; do nothing for ``None``."""
        if each is not None:
            self.remove(each)
            each.close()

    @property
    def watched(self) -> Collection[int | HasFileno]:
        """All objects and descriptors being watched."""
        return [key.fileobj for key in self._selector.get_map().values()]

    def _set(self, fileobj: int | HasFileno, event: int, call: Call) -> None:
        try:
            key = self._selector.get_key(fileobj)
        except KeyError:
            self._register(fileobj, event, call)
            return
        key.data[event] = call
        if not key.events & event:
            self._selector.modify(fileobj, key.events | event, key.data)

    def _register(self, fileobj: int | HasFileno, event: int, call: Call) -> None:
        try:
            self._selector.register(fileobj, event, {event: call})
        except OSError as error:
            if error.errno != errno.ENOSPC:  # which is also that of a full disk
                raise
            raise HostError(
                "cannot wait for more descriptors: this user has reached the limit of epoll",
                hint="raise /proc/sys/fs/epoll/max_user_watches",
            ) from error

    # ---- timers ----------------------------------------------------------------------------

    def call_at(self, at_ns: int | None, call: Call, *, skips: bool = True) -> Timer:
        """Call once at a time, if it is known, or at that to which the timer is moved.

        It ``skips`` if :meth:`skip` moves it, as it does a time limit for others.
        """
        return Timer(self, at_ns, call, skips=skips)

    def call_later(self, seconds: float, call: Call) -> Timer:
        """Call once after a number of seconds."""
        return self.call_at(self.now_ns() + int(seconds * 1e9), call)

    def every(self, seconds: float, call: Call) -> Timer:
        """Call in the next turn, and again at intervals that :meth:`skip` does not change."""

        def again() -> None:
            timer.restart(seconds)
            call()

        timer = self.call_at(self.now_ns(), again, skips=False)
        return timer

    def follow(self, steps: Steps[T], done: Callable[[T], object]) -> None:
        """Take the first step now and the others in later turns; pass on the result."""
        try:
            wait_s = next(steps)
        except StopIteration as end:
            done(end.value)
        else:
            self.call_later(min(wait_s, _STEP_S), partial(self.follow, steps, done))

    def each_turn(self, call: Call, *, due: Callable[[], int | None] | None = None) -> None:
        """Call in every turn, after ready descriptors, in the order of registration.

        Also start one by the time that ``due`` returns, as :meth:`wake_by` does.
        """
        self._each_turn.append(call)
        if due is not None:
            self.wake_by(due)

    def wake_by(self, due: Callable[[], int | None]) -> None:
        """Start a turn by the time that ``due`` returns before each wait."""
        self._deadlines.append(due)

    def on_skip(self, call: Callable[[int], object]) -> None:
        """Call with each duration passed to :meth:`skip`."""
        self._skips.append(call)

    def push(self, at_ns: int, timer: Timer) -> None:
        """Enter a time of a timer; for :class:`Timer` only."""
        heapq.heappush(self._heap, (at_ns, next(self._order), timer))

    def skip(self, lost_ns: int) -> None:
        """Ignore a duration: postpone the timers that skip, and call :meth:`on_skip` functions."""
        for timer in dict.fromkeys(timer for _, _, timer in sorted(self._heap)):
            if timer.skips and timer.at_ns is not None:
                timer.move(timer.at_ns + lost_ns)
        for skip in self._skips:
            skip(lost_ns)

    @property
    def next_ns(self) -> int | None:
        """The latest time of the next turn, ``None`` for no limit."""
        while self._heap and self._heap[0][2].at_ns != self._heap[0][0]:
            heapq.heappop(self._heap)
        times = [due() for due in self._deadlines]
        times.append(self._heap[0][0] if self._heap else None)
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    # ---- turns -----------------------------------------------------------------------------

    def wait(self, *, least_s: float = 0.0, most_s: float | None = None) -> None:
        """Wait until something is ready or due, but at most for ``most_s``.

        Timers that are due do not end the wait before ``least_s``.
        """
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
        self._waited_ns += self.due_ns - self.asleep_ns

    def count_lost_ns(self, *, was_suspended: bool = False) -> int:
        """Return the time since the last call, without that of waits that were not late.

        If this process was suspended, as SIGCONT tells, nobody knows since when: all of it counts.
        """
        now_ns = self.now_ns()
        lost_ns = now_ns - self._counted_ns - (0 if was_suspended else self._waited_ns)
        self._counted_ns, self._waited_ns = now_ns, 0
        return lost_ns

    def call_ready(self) -> None:
        """Call the functions of ready descriptors, unless removed in the meantime."""
        ready, self._ready = self._ready, []
        for key, events in ready:
            called: Call | None = None
            for event in (EVENT_READ, EVENT_WRITE):
                call = key.data.get(event) if events & event else None
                if call is not None and call != called:
                    called = call
                    call()

    def call_due(self) -> None:
        """Call the functions of every turn, and then due timers."""
        for call in self._each_turn:
            call()
        now_ns, due = self.now_ns(), []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, timer = heapq.heappop(self._heap)
            if timer.at_ns == at_ns:  # otherwise it was moved, and has another entry
                due.append(timer)
        for timer in due:
            timer.expire(now_ns)

    def turn(self, *, most_s: float | None = None) -> None:
        """Wait until something is ready or due, and call it."""
        self.wait(most_s=most_s)
        self.call_ready()
        self.call_due()

    def poll(self, timeout_s: float | None) -> int:
        """Wait only for descriptors, call those that are ready, and return their number."""
        self._ready = self._selector.select(timeout_s)
        count = len(self._ready)
        self.call_ready()
        return count

    def run_until(self, done: Callable[[], object], *, timeout_s: float | None = None) -> None:
        """Run turns until ``done()`` is true, or for ``timeout_s``."""
        end = self.call_at(None, lambda: None)
        if timeout_s is not None:
            end.restart(timeout_s)
        while not done() and (timeout_s is None or end.is_pending):
            self.turn()
        end.cancel()

    def close(self) -> None:
        """Stop all calls; callers close the descriptors that they have added."""
        for key in (self._selector.get_map() or {}).values():
            key.data.clear()
        self._selector.close()
        if self._wakeup_pipe:
            signal.set_wakeup_fd(-1)
            for end in self._wakeup_pipe:
                os.close(end)
            self._wakeup_pipe = ()
        self._each_turn.clear()
        self._heap.clear()

    def __enter__(self) -> Reactor:
        """Return the reactor, to be closed after the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the reactor."""
        self.close()
