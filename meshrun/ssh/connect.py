"""The connections to all hosts: starts agents, waits for messages, and retries lost hosts."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from meshrun import __version__
from meshrun.console.console import Console
from meshrun.console.outlet import last_read_s
from meshrun.errors import InternalError, RendezvousError
from meshrun.host.named_files import absolute
from meshrun.host.process_state import wait_until_stopped
from meshrun.host.processes import send_signal
from meshrun.host.reactor import Reactor
from meshrun.plan.parse import format_nnodes
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.plan.request import LaunchRequest
from meshrun.ssh.agent_messages import BEAT_S, Alive, Hello, Listen
from meshrun.ssh.host_phases import HostPhase, HostPolicy
from meshrun.ssh.host_session import (
    HostFailure,
    HostSession,
    describe_silence,
    end_all,
    is_this_machine,
    same_machine,
    unusable_error,
)
from meshrun.ssh.remote_command import agent_command, boot_command, find_starter
from meshrun.supervisor.signals import SignalQueue

_BUSY = "exchange_identification: "
"""ssh's error if a server closes the connection at once, as it does beyond its ``MaxStartups``."""
_BUSY_FOR_S = (0.3, 1.5)
_FIRST_TRY_S = 5.0
_LONGEST_S = 60.0


class StoppedBySignal(Exception):
    """A signal stopped the launch, and no launcher on a host can report it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Connector:
    """Starts an agent on every host, which must have our version of meshrun, but no launcher."""

    def __init__(self, request: LaunchRequest, pool: HostPool, policy: HostPolicy) -> None:
        if request.remote is None:
            raise InternalError("no hosts to launch on")
        self._request, self._remote, self._pool = request, request.remote, pool
        self._policy, self._start = policy, find_starter(self._remote)
        self._busy: dict[int, HostFailure] = {}
        """The last failure of each host that is retried."""

    @property
    def least(self) -> int:
        """The number of hosts that are needed to start."""
        return self._request.rendezvous.least_nodes or len(self._remote.hosts)

    def connect(self, excluded: Mapping[str, str]) -> dict[int, HostFailure]:
        """Start an agent on each host; return the failures of hosts that are not needed.

        ``excluded`` are hosts that are not to be used, and why.

        Raises:
            RendezvousError: If too few hosts have one after all were tried.
            UsageError: If two hosts are the same machine.
        """
        for number in range(len(self._remote.hosts)):
            self._pool.sessions.append(self.open_session(number))
        names = ", ".join(host.name for host in self._remote.hosts[:8])
        self._pool.console.set_status(f"connecting to {names}")
        failures = {
            session.number: HostFailure(session.host.name, excluded[session.host.name])
            for session in self._pool.sessions
            if session.host.name in excluded
        }
        while open_ones := [
            session
            for session in self._pool.sessions
            if session.phase is not HostPhase.READY and session.number not in failures
        ]:
            self._pool.turn()
            for session in open_ones:
                if (failure := self._final_failure(session)) is not None:
                    failures[session.number] = failure
            self._stop_early()
        self._pool.console.set_status("")
        total = len(self._pool.sessions)
        if total - len(failures) < self.least:
            found = [failures[number] for number in sorted(failures)]
            raise unusable_error(found, total, self.least)
        if not self._remote.start_command:  # such a command may lead to parts of one machine
            self._check_distinct()
        return failures

    def _final_failure(self, session: HostSession) -> HostFailure | None:
        """Return why a host cannot be used, unless it is retried."""
        is_open = session.phase is HostPhase.CONNECTING
        failure = self.failure(session) if is_open else None
        if failure is None or self._schedule_retry(session, failure):
            return None
        # The last attempt may have been too late for an answer.
        return failure if session.output else self._busy.get(session.number, failure)

    def _schedule_retry(self, session: HostSession, why: HostFailure) -> bool:
        """Retry a host later if it, or one on the way, may be busy; return whether it does."""
        wait_s = random.uniform(*_BUSY_FOR_S)  # noqa: S311 - spreads the retries
        left_s = session.began + self._remote.access.connect_timeout_s - self._pool.reactor.now_s()
        if _BUSY not in session.output or left_s < wait_s:
            return False
        session.close()
        self._busy[session.number] = why

        def reopen() -> None:
            again = self._pool.sessions[session.number] = self.open_session(session.number)
            again.began = session.began

        self._pool.reactor.call_later(wait_s, reopen)
        return True

    def _check_distinct(self) -> None:
        """Check that no machine answers under two names."""
        names: dict[str, str] = {}
        for session in self._pool.sessions:
            machine = session.ready.machine if session.ready is not None else ""
            if machine and names.setdefault(machine, session.host.name) != session.host.name:
                raise same_machine(names[machine], session.host.name)

    def open_session(self, number: int) -> HostSession:
        """Start connecting to a host, by its index in the list.

        Raises:
            RendezvousError: If ssh cannot be run.
        """
        host = self._remote.hosts[number]
        starter = self._remote.access.starter or "ssh"
        if not self._remote.start_command and is_this_machine(host):
            command, starter = boot_command(sys.executable), ""
        else:
            command = self._start(host, agent_command(sys.executable))
        reactor, console = self._pool.reactor, self._pool.console
        try:
            session = HostSession(
                number, host, command, starter=starter, reactor=reactor, console=console
            )
        except OSError as error:
            raise RendezvousError(
                f"cannot run `{command[0]}`: {error.strerror}",
                hint="use --ssh to set the ssh command, or --launcher for another way to the hosts",
            ) from error
        session.greet(
            Hello(
                nonce=session.nonce,
                version=__version__,
                path=[
                    absolute(path)
                    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                    if path
                ],
                cwd=os.getcwd(),
                controller=os.uname().nodename,
                lease_s=self._request.rendezvous.node_timeout_s,
                grace_s=self._request.shutdown_timeout_s,
            )
        )
        return session

    def failure(self, session: HostSession) -> HostFailure | None:
        """Return why a host cannot be used, once that is known."""
        if session.agent_error is not None:
            return HostFailure(session.host.name, session.agent_error.why, session.agent_error.hint)
        if session.is_closed:
            return session.finish()
        timeout_s = self._remote.access.connect_timeout_s
        if self._pool.reactor.now_s() - session.began > timeout_s:
            return describe_silence(
                session.host, timeout_s, session.output, starter=session.starter
            )
        return None

    def open_endpoint(self, sessions: Sequence[HostSession]) -> list[str]:
        """Return the launchers' rendezvous options; the first host's agent opens the endpoint.

        Raises:
            RendezvousError: If it cannot, or exits.
        """
        requested = self._request.rendezvous
        most = self._request.nnodes or len(sessions)
        nnodes = ["--nnodes", format_nnodes(requested.least_nodes, most)]
        is_alone = len(sessions) == 1 and self._policy.needs_all
        if is_alone or requested.has_address:
            return nnodes
        first, *others = sessions
        own = [first.ready.own] if first.ready is not None else []
        seen = [other.ready.theirs for other in others if other.ready is not None]
        first.send(Listen(addresses=[*own, *seen]))
        first.began = self._pool.reactor.now_s()
        while first.endpoint is None:
            self._pool.turn()
            self._stop_early()
            if (failure := self.failure(first)) is not None:
                raise unusable_error([failure], 1, 1)
        return [*nnodes, "--rdzv-endpoint", format_endpoint(*first.endpoint)]

    def _stop_early(self) -> None:
        for signum in self._pool.signals.take():
            if signum in self._request.stop_signals:
                raise StoppedBySignal(signum)
            if signum == signal.SIGTSTP and signum not in self._request.forwarded_signals:
                suspend_foreground()


class HostRetry:
    """The missing hosts, and when each is tried again.

    Args:
        start: Starts a launcher on a host that has answered.
    """

    def __init__(
        self, connector: Connector, pool: HostPool, *, start: Callable[[HostSession], None]
    ) -> None:
        self._connector, self._pool, self._start = connector, pool, start
        self._absences: dict[int, HostFailure] = {}
        self._reported: dict[int, str] = {}
        """What the last note said about each of them."""
        self._waits: dict[int, float] = {}
        """The last delay of each host, which it keeps when it is back."""
        self._is_closed = False

    def add(self, session: HostSession, why: HostFailure, *, report: bool = True) -> None:
        """Continue without a host, whose connection is closed, and retry it later.

        A ``report`` is a note at once rather than at the next attempt, which does not happen if the
        launch is ending: its launchers exit one after the other.
        """
        session.close()
        if not self._is_closed:
            self._schedule(session.number, why)
        if report:
            self._report(session.number, why)

    def exclude(self, session: HostSession, why: HostFailure) -> None:
        """Continue without a host, for good."""
        session.close()
        self._report(session.number, why)

    def _schedule(self, number: int, why: HostFailure) -> None:
        """Retry a host after twice its last delay."""
        self._absences[number] = why
        wait_s = min(2 * self._waits.get(number, _FIRST_TRY_S / 2), _LONGEST_S)
        self._waits[number] = wait_s
        self._pool.reactor.call_later(wait_s, partial(self._try, number))

    def check(self) -> None:
        """Start launchers on hosts that have answered, and postpone those that do not answer."""
        for number in list(self._absences):
            session = self._pool.sessions[number]
            if session.phase is HostPhase.READY:
                del self._absences[number], self._reported[number]
                self._pool.console.note(f"host {session.host.name} is back")
                self._start(session)
            elif session.phase is HostPhase.CONNECTING:
                failure = self._connector.failure(session)
                if failure is not None:
                    session.close()
                    self._postpone(number, failure)

    def _try(self, number: int) -> None:
        if (why := self._absences.get(number)) is None:
            return
        self._report(number, why)
        try:
            self._pool.sessions[number] = self._connector.open_session(number)
        except RendezvousError as error:  # such as too many processes
            self._postpone(number, HostFailure(why.host, error.message))

    def _postpone(self, number: int, why: HostFailure) -> None:
        self._schedule(number, why)
        self._report(number, why)

    def _report(self, number: int, why: HostFailure) -> None:
        if self._reported.get(number) != why.why:
            self._reported[number] = why.why
            self._pool.console.note(f"continuing without host {why.host}: {why.why}")

    def close(self) -> None:
        """Stop all retries."""
        self._is_closed = True
        for number in self._absences:
            self._pool.sessions[number].close()
        self._absences.clear()


class HostPool:
    """The sessions of all hosts, their common console, and the signals that arrive.

    Time in which a slow reader of our output keeps us from listening does not count as silence.
    """

    def __init__(self, signals: SignalQueue, *, shutdown_timeout_s: float) -> None:
        self.signals, self._shutdown_timeout_s = signals, shutdown_timeout_s
        self._stops, self._stopped = 0, 0.0
        """How many signals have stopped the launch, and when the first one did."""
        self.reactor = Reactor()
        self._waits_since = self.reactor.now_s()
        """Since when a reader of our output may be stuck, or since the last such signal."""
        self._dropped = 0
        self.sessions: list[HostSession] = []
        self.console = Console()
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
            self._waits_since = self.reactor.now_s()
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
                session.received = self.reactor.now_s()  # this process was not listening
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
        self._waits_since = self.reactor.now_s()
        self._stopped = self._stopped or self._waits_since

    def _left_s(self, until: float) -> float:
        """Return how long to wait for a slow reader, which has until ``until`` during a stop."""
        if self._stops == 0:
            return math.inf
        if self._stops > 1 or self._dropped:
            return 0.0
        return max(0.0, until - self.reactor.now_s())

    def close(self, on_signals: Callable[[], None]) -> None:
        """End every session and write the remaining output; ``on_signals`` handles signals."""
        end_all(self.sessions)
        for session in self.sessions:
            session.close()
        self.console.close()
        until = last_read_s(self._stopped, self.reactor.now_s(), self._shutdown_timeout_s)
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
