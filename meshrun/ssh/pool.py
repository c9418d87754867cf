"""The connections to all hosts: waits for messages, and sends heartbeats."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial

from meshrun.console.console import Console
from meshrun.console.outlet import last_read_s
from meshrun.host.process_state import wait_until_stopped
from meshrun.host.processes import send_signal
from meshrun.host.reactor import Reactor
from meshrun.ssh.agent_messages import BEAT_S, Alive
from meshrun.ssh.host_phases import HostPhase
from meshrun.ssh.host_session import HostSession, end_all
from meshrun.supervisor.signals import SignalQueue


class HostPool:
    """The sessions of all hosts, their common console, and the signals that arrive.

    Time in which a slow reader of our output keeps us from listening does not count as silence.
    """

    def __init__(self, signals: SignalQueue, *, shutdown_timeout_s: float) -> None:
        self.signals, self._shutdown_timeout_s = signals, shutdown_timeout_s
        self._stops, self._stopped = 0, 0.0
        """How many signals have stopped the launch, and when the first one did."""
        self._waits_since = time.monotonic()
        """Since when a reader of our output may be stuck, or since the last such signal."""
        self._dropped = 0
        self.sessions: list[HostSession] = []
        self.console = Console()
        self.reactor = Reactor()
        self.reactor.add_reader(signals, lambda: None)  # wakes the loop; the callers take them
        self.reactor.wake_by(lambda: self.console.next_wake_ns)
        self.reactor.every(BEAT_S, self._beat)

    @property
    def listened(self) -> float:
        """When this process last listened: what had arrived by then was read."""
        return self.reactor.asleep_ns / 1e9

    def turn(self) -> None:
        """Wait for the next event, and handle it."""
        if not (is_full := self.console.is_full):
            self._waits_since = time.monotonic()
        for session in self.sessions:
            for fd in session.open_pipes:
                if is_full:
                    self.reactor.remove(fd)
                else:
                    self.reactor.add_reader(fd, partial(session.read, fd))
        self.console.watch_readers(self.reactor)
        self.reactor.wait()
        if is_full:
            for session in self.sessions:
                session.received = time.monotonic()  # this process was not listening
            self.reactor.skip(self.reactor.now_ns() - self.reactor.asleep_ns)
        self.reactor.call_ready()
        self.reactor.call_due()
        # Half of the time that the launch has to end: hosts that can write again need the rest.
        if is_full and not self._left_s(self._waits_since + self._shutdown_timeout_s / 2):
            self._dropped += self.console.drop_waiting()
        self.console.show_waiting()

    def _beat(self) -> None:
        for session in self.sessions:
            if session.phase is not HostPhase.CONNECTING:
                session.send(Alive())

    def record_stop(self) -> None:
        """Limit the wait for slow readers, as a signal stops the launch."""
        self._stops += 1
        self._waits_since = time.monotonic()
        self._stopped = self._stopped or self._waits_since

    def _left_s(self, until: float) -> float:
        """Return how long to wait for a slow reader, which has until ``until`` during a stop."""
        if self._stops == 0:
            return math.inf
        if self._stops > 1 or self._dropped:
            return 0.0
        return max(0.0, until - time.monotonic())

    def close(self, on_signals: Callable[[], None]) -> None:
        """End every session and write the remaining output; ``on_signals`` handles signals."""
        end_all(self.sessions)
        for session in self.sessions:
            session.close()
        self.console.close()
        until = last_read_s(self._stopped, time.monotonic(), self._shutdown_timeout_s)
        while self.console.waiting and (left_s := self._left_s(until)):
            self.console.wait_for_reader(self.reactor, None if left_s == math.inf else left_s)
            on_signals()
        self._dropped += self.console.drop_waiting()
        if self._dropped:
            self.console.note_dropped(self._dropped)
            self.console.drop_waiting()
        self.signals.restore_late()
        self.reactor.close()


def suspend_foreground() -> None:
    """Suspend the parent, which the shell waits for, as Ctrl-Z requests; for the child."""
    send_signal(pid := os.getppid(), signal.SIGSTOP)
    wait_until_stopped([pid])
