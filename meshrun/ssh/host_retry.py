"""Lost hosts of an elastic launch, which are retried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshrun.errors import RendezvousError
from meshrun.ssh.connect import Connector
from meshrun.ssh.host_failure import Refusal
from meshrun.ssh.host_session import HostSession
from meshrun.ssh.pool import HostPool

_FIRST_TRY_S = 5.0
_LONGEST_S = 60.0


@dataclass(slots=True)
class _Absence:
    """A host that is not there."""

    why: Refusal
    is_told: bool
    """Whether people know of it."""
    session: HostSession | None = None
    """The connection, while it is tried."""


class HostRetry:
    """Which hosts are not there, and when each is tried again.

    Args:
        start: Has a launcher started on a host that has answered.
    """

    def __init__(
        self, connector: Connector, pool: HostPool, *, start: Callable[[HostSession], None]
    ) -> None:
        self._connector, self._pool, self._start = connector, pool, start
        self._absences: dict[int, _Absence] = {}
        self._waits: dict[int, float] = {}
        """For how long each host was left alone last; those that come back keep it."""
        self._is_closed = False

    def add(self, session: HostSession, why: Refusal, *, tell: bool = True) -> None:
        """Continue without a host.

        Args:
            session: Its connection; it is closed.
            why: What is wrong.
            tell: Whether to say so at once, rather than when it is tried again: at the end of a
                launch its launchers end one after the other.
        """
        session.close()
        self._pool.screen.end(session.number)
        absence = self._leave_alone(session.number, why, is_told=False)
        if tell:
            self._tell(absence)

    def give_up(self, session: HostSession, why: Refusal) -> None:
        """Continue without a host, for good."""
        session.close()
        self._pool.screen.end(session.number)
        self._tell(_Absence(why, is_told=False))

    def _leave_alone(self, number: int, why: Refusal, *, is_told: bool) -> _Absence:
        """Have a host tried again after twice the time of before."""
        wait_s = min(2 * self._waits.get(number, _FIRST_TRY_S / 2), _LONGEST_S)
        self._waits[number] = wait_s
        self._absences[number] = absence = _Absence(why, is_told=is_told)
        self._pool.reactor.call_later(wait_s, partial(self._try, number, absence))
        return absence

    def look(self) -> None:
        """Give up hosts that do not answer while they are tried, and start the others."""
        for number, absence in list(self._absences.items()):
            if absence.session is not None:
                self._look_at(number, absence, absence.session)

    def _try(self, number: int, absence: _Absence) -> None:
        if self._is_closed:
            return
        self._tell(absence)
        try:
            session = self._connector.go_to(number)
        except RendezvousError as error:  # no room for another process, perhaps
            self._postpone(number, absence, Refusal(absence.why.host, error.message))
            return
        session.is_done = True  # nothing is expected of it yet
        absence.session = self._pool.sessions[number] = session

    def _look_at(self, number: int, absence: _Absence, session: HostSession) -> None:
        if session.ready is not None and session.refused is None:
            del self._absences[number]
            self._pool.console.note(f"host {session.host.name} is back")
            session.is_done = False
            self._start(session)
        elif (refusal := self._connector.refusal(session)) is not None:
            session.close()
            self._postpone(number, absence, refusal)

    def _postpone(self, number: int, before: _Absence, why: Refusal) -> None:
        is_told = before.is_told and why.why == before.why.why
        self._tell(self._leave_alone(number, why, is_told=is_told))

    def _tell(self, absence: _Absence) -> None:
        if not absence.is_told:
            absence.is_told = True
            why = absence.why
            self._pool.console.note(f"continuing without host {why.host}: {why.why}")

    def close(self) -> None:
        """Try none again."""
        self._is_closed = True
        for absence in self._absences.values():
            if absence.session is not None:
                absence.session.close()
        self._absences.clear()
