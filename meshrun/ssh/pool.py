"""The ways to all hosts: takes whatever comes first, and says that this end is there."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from functools import partial

from meshrun.ssh.framing import BEAT_S
from meshrun.ssh.host_session import HostSession, end_all
from meshrun.ssh.merged_output import Screen
from meshrun.supervisor.signals import SignalQueue


class HostPool:
    """Every host's station, the console they share, and the signals that come meanwhile.

    Args:
        signals: What this process is sent.
    """

    def __init__(self, signals: SignalQueue) -> None:
        self.signals = signals
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
        with selectors.PollSelector() as selector:
            selector.register(self.signals, selectors.EVENT_READ, on_signals)
            for session in self.sessions:
                if session.buffer.queued_bytes:
                    selector.register(session.buffer, selectors.EVENT_WRITE, session.buffer.flush)
                if self.console.is_full:
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
        self.console.show_waiting()
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            for session in self.sessions:
                if session.ready is not None:
                    session.tell(beat=1)

    def close(self) -> None:
        """End every way, and write what is left to be shown."""
        end_all(self.sessions)
        for session in self.sessions:
            session.close()
        self.screen.finish()
        self.signals.restore()
