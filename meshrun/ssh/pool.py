"""The connections to all hosts: waits for messages, and sends heartbeats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from meshrun.console.slow_readers import LAST_WORDS_TAKE_S, SlowReaders, dropped_note
from meshrun.host.reactor import Reactor
from meshrun.ssh.framing import BEAT_S
from meshrun.ssh.host_session import HostSession, end_all
from meshrun.ssh.merged_output import Screen
from meshrun.supervisor.signals import SignalQueue


class HostPool:
    """Every host's session, the console they share, and the signals that come meanwhile.

    Time in which a reader of our output keeps us from listening counts for nothing.
    """

    def __init__(self, signals: SignalQueue, *, shutdown_timeout_s: float) -> None:
        self.signals, self._shutdown_timeout_s = signals, shutdown_timeout_s
        self._stops, self._stopped = 0, 0.0
        """How often the launch was told to stop, and when first."""
        self._waits_since = time.monotonic()
        """Since when a reader of our output may be stuck, or the launch was to stop."""
        self._dropped = 0
        self.sessions: list[HostSession] = []
        self.screen = Screen()
        self.console = self.screen.console
        self.reactor = Reactor()
        self._slow_readers = SlowReaders(self.console, self.reactor)
        self.reactor.add_reader(signals, lambda: None)  # whoever waits takes them
        self.reactor.wake_by(lambda: self.console.next_wake_ns)
        self.reactor.every(BEAT_S, self._beat)

    @property
    def listened(self) -> float:
        """When this end listened last: what had come by then has been taken."""
        return self.reactor.asleep_ns / 1e9

    def turn(self) -> None:
        """Wait for whatever comes first, and take it."""
        if not (is_full := self.console.is_full):
            self._waits_since = time.monotonic()
        for session in self.sessions:
            for fd in session.open_pipes:
                if is_full:
                    self.reactor.remove(fd)
                else:
                    self.reactor.add_reader(fd, partial(session.read, fd, self.screen.show))
        self._slow_readers.watch()
        self.reactor.wait()
        if is_full:
            for session in self.sessions:
                session.heard = time.monotonic()  # it is we who do not listen
            self.reactor.skip(self.reactor.now_ns() - self.reactor.asleep_ns)
        self.reactor.call_ready()
        self.reactor.call_due()
        # Half of what the launch may take to end: hosts that respond again need the rest.
        if is_full and not self._left_s(self._waits_since + self._shutdown_timeout_s / 2):
            self._dropped += self.console.drop_waiting()
        self.console.show_waiting()

    def _beat(self) -> None:
        for session in self.sessions:
            if session.ready is not None:
                session.tell(beat=1)

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
        """End every way, and write what is left to be shown; ``on_signals`` takes what comes."""
        end_all(self.sessions)
        for session in self.sessions:
            session.close()
        self.screen.finish()
        last_words = time.monotonic() + min(self._shutdown_timeout_s, LAST_WORDS_TAKE_S)
        while self.console.waiting and (
            left_s := self._left_s(max(self._stopped + self._shutdown_timeout_s, last_words))
        ):
            self._slow_readers.wait(None if left_s == math.inf else left_s)
            on_signals()
        self._dropped += self.console.drop_waiting()
        if self._dropped:
            self.console.note(dropped_note(self._dropped))
            self.console.drop_waiting()
        self.signals.restore()
        self.reactor.close()
