"""The connections to all hosts: waits for messages, and sends heartbeats."""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable
from functools import partial

from meshrun.console.slow_readers import LAST_WORDS_TAKE_S, dropped_note
from meshrun.ssh.framing import BEAT_S
from meshrun.ssh.host_session import HostSession, end_all
from meshrun.ssh.merged_output import Screen
from meshrun.supervisor.signals import SignalQueue


class HostPool:
    """Every host's station, the console they share, and the signals that come meanwhile.

    Args:
        signals: What this process is sent.
        shutdown_timeout_s: What a launch that is stopped may take to end.
    """

    def __init__(self, signals: SignalQueue, *, shutdown_timeout_s: float) -> None:
        self.signals, self._shutdown_timeout_s = signals, shutdown_timeout_s
        self._stops, self._stopped = 0, 0.0
        """How often the launch was told to stop, and when first."""
        self._waits_since = time.monotonic()
        """Since when a reader of our output may be stuck, or the launch was to stop."""
        self._dropped = 0
        self._deaf_s = 0.0
        self.sessions: list[HostSession] = []
        self.screen = Screen()
        self.console = self.screen.console
        self._beaten = self.listened = time.monotonic()
        """When this end listened last: what had come by then has been taken."""

    def turn(self, on_signals: Callable[[], None] = lambda: None) -> None:
        """Wait for whatever comes first, and take it.

        Args:
            on_signals: Called if there are signals; without it, whoever waits takes them.
        """
        if not (is_full := self.console.is_full):
            self._waits_since = time.monotonic()
        with selectors.PollSelector() as selector:
            selector.register(self.signals, selectors.EVENT_READ, on_signals)
            for session in self.sessions:
                if session.buffer.queued_bytes:
                    selector.register(session.buffer, selectors.EVENT_WRITE, session.buffer.flush)
                if is_full:
                    session.heard = time.monotonic()  # it is we who do not listen
                    continue
                for fd in session.open_pipes:
                    take = partial(session.read, fd, self.screen.show)
                    selector.register(fd, selectors.EVENT_READ, take)
            self.screen.watch(selector)
            wake_ns = self.console.next_wake_ns
            until_wake_s = BEAT_S if wake_ns is None else (wake_ns - time.monotonic_ns()) / 1e9
            self.listened = time.monotonic()
            for key, _ in selector.select(max(0.0, min(BEAT_S, until_wake_s))):
                key.data()
        if is_full:
            self._deaf_s += time.monotonic() - self.listened
        # Half of what the launch may take to end: hosts that are heard again need the rest.
        if is_full and not self._left_s(self._waits_since + self._shutdown_timeout_s / 2):
            self._dropped += self.console.drop_waiting()
        self.console.show_waiting()
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            for session in self.sessions:
                if session.ready is not None:
                    session.tell(beat=1)

    def now(self) -> float:
        """Return the time on a clock that stands while a reader of our output keeps us from it."""
        return time.monotonic() - self._deaf_s

    def note_stop(self) -> None:
        """The launch was told to stop: from now on a reader that takes nothing has a limit."""
        self._stops += 1
        self._waits_since = time.monotonic()
        self._stopped = self._stopped or self._waits_since

    def _left_s(self, until: float) -> float:
        """Return for how long a reader of our output is still waited for, if it has until then."""
        if self._stops == 0:
            return math.inf
        if self._stops > 1 or self._dropped:
            return 0.0
        return max(0.0, until - time.monotonic())

    def close(self, on_signals: Callable[[], None]) -> None:
        """End every way, and write what is left to be shown."""
        end_all(self.sessions)
        for session in self.sessions:
            session.close()
        self.screen.finish()
        last_words = time.monotonic() + min(self._shutdown_timeout_s, LAST_WORDS_TAKE_S)
        while self.console.waiting and (
            left_s := self._left_s(max(self._stopped + self._shutdown_timeout_s, last_words))
        ):
            with selectors.PollSelector() as selector:
                selector.register(self.signals, selectors.EVENT_READ, on_signals)
                self.screen.watch(selector)
                for key, _ in selector.select(None if left_s == math.inf else left_s):
                    key.data()
        self._dropped += self.console.drop_waiting()
        if self._dropped:
            self.console.note(dropped_note(self._dropped))
            self.console.drop_waiting()
        self.signals.restore()
