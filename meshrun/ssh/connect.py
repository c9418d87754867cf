"""From a list of hosts to an agent on each, and to the endpoint of their launchers."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial

from meshrun.errors import InternalError, RendezvousError
from meshrun.plan.parse import format_nnodes
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.plan.request import LaunchRequest
from meshrun.ssh.foreground import suspend_foreground
from meshrun.ssh.host_failure import Refusal, describe_silence, refusal_error
from meshrun.ssh.host_session import HostSession, is_this_machine, same_machine
from meshrun.ssh.pool import HostPool
from meshrun.ssh.remote_command import BOOT_FOLDER, agent_command, boot_command, without_own
from meshrun.ssh.starters import find_starter

_LISTENS_IN_S = 10.0
"""What the first host may take to open the socket where the nodes meet."""
_BUSY = "exchange_identification: "
"""What ssh says of a server that hangs up at once, as it does beyond its ``MaxStartups``."""
_BUSY_FOR_S = (0.3, 1.5)


class Stopped(Exception):
    """A signal ended the launch, and no launcher on a host can say so."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Connector:
    """Brings an agent to every host; nothing is started yet.

    Args:
        version: That of this meshrun, which every host has to have.
    """

    def __init__(self, request: LaunchRequest, pool: HostPool, *, version: str) -> None:
        if request.remote is None:
            raise InternalError("no hosts to launch on")
        self._request, self._remote, self._pool = request, request.remote, pool
        self._version = version
        self._start = find_starter(self._remote)
        self._busy: dict[int, Refusal] = {}
        """Of hosts that are tried again, why."""

    def connect(self) -> dict[int, Refusal]:
        """Have an agent on each host; return why there is none on those that can be done without.

        Raises:
            RendezvousError: If too few have one, after all were tried.
            UsageError: If two of them are one machine.
        """
        for number in range(len(self._remote.hosts)):
            self._pool.sessions.append(self.go_to(number))
        names = ", ".join(host.name for host in self._remote.hosts[:8])
        self._pool.console.set_status(f"connecting to {names}")
        refusals: dict[int, Refusal] = {}
        while open_ones := [
            session
            for session in self._pool.sessions
            if session.ready is None and session.number not in refusals
        ]:
            self._pool.turn()
            for session in open_ones:
                if session.ready is not None or session.is_done:
                    continue
                refusal = self.refusal(session)
                if refusal is None:
                    continue
                if self._goes_again(session):
                    self._busy[session.number] = refusal
                else:  # the last try may have come too late to be answered
                    busy = None if session.said else self._busy.get(session.number)
                    refusals[session.number] = busy or refusal
            self._stop_early()
        self._pool.console.set_status("")
        total = len(self._pool.sessions)
        least = self._request.rendezvous.least_nodes or total
        if total - len(refusals) < least:
            found = [refusals[number] for number in sorted(refusals)]
            raise refusal_error(found, total, least)
        if not self._remote.way:  # which may lead to parts of a machine
            self._check_distinct()
        return refusals

    def _goes_again(self, session: HostSession) -> bool:
        """Return whether to retry a host, as it or a host on the way may have been busy."""
        wait_s = random.uniform(*_BUSY_FOR_S)  # noqa: S311 - spreads those that go again
        left_s = session.began + self._remote.reach.connect_timeout_s - time.monotonic()
        if _BUSY not in session.said or left_s < wait_s:
            return False
        session.close()
        self._pool.reactor.call_later(wait_s, partial(self._go_again, session))
        return True

    def _go_again(self, before: HostSession) -> None:
        session = self.go_to(before.number)
        session.began = before.began
        self._pool.sessions[before.number] = session

    def _check_distinct(self) -> None:
        """Check that no machine has answered under two names."""
        names: dict[str, str] = {}
        for session in self._pool.sessions:
            machine = (session.ready or {}).get("machine", "")
            if machine and names.setdefault(machine, session.host.name) != session.host.name:
                raise same_machine(names[machine], session.host.name)

    def go_to(self, number: int) -> HostSession:
        """Set out for a host, by its place in the list.

        Raises:
            RendezvousError: If there is no ssh to go by.
        """
        host = self._remote.hosts[number]
        env = without_own(os.environ)
        cwd: str | None = BOOT_FOLDER
        starter = self._remote.reach.starter or "ssh"
        if not self._remote.way and is_this_machine(host):
            command, starter = boot_command(sys.executable), ""
        else:
            env, cwd = dict(os.environ), None
            command = self._start(host, agent_command(sys.executable))
        try:
            session = HostSession(
                number, host, command, env, cwd=cwd, reactor=self._pool.reactor, starter=starter
            )
        except OSError as error:
            raise RendezvousError(
                f"cannot run `{command[0]}`: {error.strerror}",
                hint="use --ssh to set the ssh command, or --launcher for another way to the hosts",
            ) from error
        session.tell(
            nonce=session.nonce,
            version=self._version,
            path=[
                os.path.abspath(path)
                for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                if path
            ],
            cwd=os.getcwd(),
            controller=os.uname().nodename,
            lease_s=self._request.node_timeout_s,
            grace_s=self._request.shutdown_timeout_s,
        )
        return session

    def refusal(self, session: HostSession) -> Refusal | None:
        """Return why a host cannot be used, if that is known yet."""
        name, destination = session.host.name, session.host.destination
        if session.refused is not None:
            return Refusal(name, session.refused["refused"], session.refused["hint"])
        if session.is_closed:
            return session.finish()
        timeout_s = self._remote.reach.connect_timeout_s
        if time.monotonic() - session.began > timeout_s:
            return describe_silence(
                name, destination, timeout_s, session.said, starter=session.starter
            )
        return None

    def meet(self, sessions: Sequence[HostSession]) -> list[str]:
        """Return the options that bring nodes together; the agent of the first one listens.

        Raises:
            RendezvousError: If it cannot.
        """
        asked = self._request.rendezvous
        most = self._request.nnodes or len(sessions)
        nnodes = ["--nnodes", format_nnodes(asked.least_nodes, most)]
        is_alone = len(sessions) == 1 and asked.least_nodes is None
        if is_alone or asked.has_address:
            return nnodes
        first, *others = sessions
        known = first.ready or {}
        seen = [(other.ready or {}).get("theirs", "") for other in others]
        first.tell(listen=[known.get("own", ""), *seen])
        began = time.monotonic()
        while first.endpoint is None:
            self._pool.turn()
            self._stop_early()
            waited_s = time.monotonic() - began
            if first.refused is not None or first.is_closed or waited_s > _LISTENS_IN_S:
                said = (first.refused or {}).get("refused", first.said.strip())
                raise RendezvousError(f"host {first.host.name} cannot listen: {said}")
        return [*nnodes, "--rdzv-endpoint", format_endpoint(*first.endpoint)]

    def _stop_early(self) -> None:
        for signum in self._pool.signals.take():
            if signum in self._request.stop_signals:
                raise Stopped(signum)
            if signum == signal.SIGTSTP and signum not in self._request.forwarded_signals:
                suspend_foreground()
