"""Lost hosts of an elastic launch, which are retried."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshrun.errors import RendezvousError
from meshrun.ssh.connect import Connector
from meshrun.ssh.host_failure import HostFailure
from meshrun.ssh.host_phases import HostPhase
from meshrun.ssh.host_session import HostSession
from meshrun.ssh.pool import HostPool

_FIRST_TRY_S = 5.0
_LONGEST_S = 60.0


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
        """Continue without a host, and retry it later.

        Args:
            session: Its connection, which is closed.
            why: What is wrong.
            report: Whether to print a note at once rather than at the next attempt, which does not
                happen if the launch is ending: its launchers exit one after the other.
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
