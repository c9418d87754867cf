"""A launch on several hosts from one command: one agent and one launcher on each.

This process starts no ranks. It connects to the hosts, sets the endpoint, shows their output and
forwards signals. The launchers stop if it exits.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from functools import partial

from meshrun.errors import MeshrunError, NodeExcludedError, signal_of_code
from meshrun.host.own_variables import HOSTS_PRESENT, SECRET
from meshrun.host.process_state import is_stopped
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import LaunchResult, signal_name
from meshrun.ssh.agent_messages import SignalLauncher, StartLauncher, StopLauncher
from meshrun.ssh.connect import Connector, HostPool, HostRetry, StoppedBySignal, suspend_foreground
from meshrun.ssh.host_phases import ELASTIC, FIXED, ControllerPhase, HostPhase
from meshrun.ssh.host_session import HostFailure, HostSession, lost_error
from meshrun.ssh.remote_command import devices_of, exported
from meshrun.supervisor.signals import Pause, SignalQueue

_OTHERS_REPORT_S = 1.0
"""How long the other launchers may take to report the error of the first that cannot launch."""
_SAME_MOMENT_S = 1.0
_GRACE_S = 10.0
"""How long hosts may take to end after one has, or a signal, beyond ranks' and nodes' timeouts."""

_STOPS = (ControllerPhase.ENDING, ControllerPhase.RESTARTING)
"""The phases in which the launchers that are left were told to stop."""


class Controller:
    """One launch on several hosts.

    Args:
        words: The launchers' command line, without what differs between nodes.
        excluded: Hosts found unfit, and why; this launch adds its own.
    """

    def __init__(
        self, request: LaunchRequest, words: Sequence[str], *, excluded: dict[str, str]
    ) -> None:
        self._request, self._words, self._excluded = request, words, excluded
        self._env = {
            **exported(os.environ, request.access.export),
            SECRET: os.environ.get(SECRET) or secrets.token_hex(32),
        }
        self._signals = SignalQueue(
            request.stop_signals,
            even_if_ignored=request.stop_even_if_ignored,
            always=(signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT, *request.forwarded_signals),
        )
        self._pool = HostPool(self._signals, shutdown_timeout_s=request.shutdown_timeout_s)
        self._policy = ELASTIC if request.rendezvous.is_elastic else FIXED
        self._connector = Connector(request, self._pool, self._policy)
        self._sessions, self._console = self._pool.sessions, self._pool.console
        self._retry = HostRetry(self._connector, self._pool, start=self._start_on)
        self._phase = ControllerPhase.CONNECTING
        self._first: HostSession
        """The session of node 0, which reports the result; set by the time launchers start."""
        claims_sigtstp = {*request.stop_signals, *request.forwarded_signals} & {signal.SIGTSTP}
        self._pause = Pause(
            self._pool.reactor,
            None if claims_sigtstp else partial(is_stopped, os.getppid()),
            stop=self._suspend_ranks,
            resume=self._resume_ranks,
        )
        self._present: list[str] = []
        """The hosts on which ranks run at first, in node order."""
        self._places: dict[int, int] = {}
        """The node ranks of these hosts, kept by those that are lost before all have joined."""
        self._rendezvous: Sequence[str] = ()
        """The launchers' rendezvous options."""
        self._lost: list[HostFailure] = []
        self._lost_s = 0.0
        """When the first host was lost."""
        self._stopped: StoppedBySignal | None = None
        """By the first signal that stopped the launch."""
        self._stopped_s = 0.0
        """When it arrived."""
        self._forwarded: set[int] = set()
        """Signals that were forwarded."""
        call_at = self._pool.reactor.call_at
        self._deadline = call_at(None, lambda: None)
        """When hosts must have ended, once one launcher has."""
        self._last_errors = call_at(None, partial(self._enter, ControllerPhase.ENDING))
        """Until when other launchers may report why they cannot launch, once one has."""

    def run(self) -> int:
        """Launch, and return how node 0's launcher ended: exit code, or -n for signal n.

        Raises:
            FirstLost: If the first host of an elastic launch was lost.
            MeshrunError: If another required host cannot be used or was lost.
            StoppedBySignal: If a signal arrived before all hosts had answered or after all ranks
                had ended, or killed ssh as well, or if nobody reads the output.
        """
        try:
            self._start(self._connector.connect(self._excluded))
            while self._launched:
                self._pool.turn()
                self._forward_signals()
                self._check_hosts()
            self._enter(ControllerPhase.ENDING)
        finally:
            before = frozenset(self._forwarded)
            self._pool.close(self._forward_signals)
        if (error := self._error()) is not None:
            raise error
        if self._console.reader_is_gone:
            raise StoppedBySignal(signal.SIGPIPE)
        code = self._first.ended.code if self._first.ended is not None else 0
        if code and self.result is None and self._stopped is not None:
            raise self._stopped  # it had not begun, or its agent killed it
        if not code and (late := (self._forwarded - before) & {*self._request.stop_signals}):
            # The ranks had finished, but not the readers of their output.
            raise StoppedBySignal(min(late))
        signum = signal_of_code(code)
        return -signum if signum in self._forwarded else code

    def _error(self) -> MeshrunError | StoppedBySignal | None:
        """Return the loss of a host, or why no launcher could launch."""
        stopped = self._stopped
        if self._lost:
            # At the same moment, every process here received it, so ssh did too.
            if stopped is not None and self._stopped_s < self._lost_s + _SAME_MOMENT_S:
                return stopped
            may_restart = self._phase is ControllerPhase.RESTARTING and stopped is None
            return lost_error(self._lost, may_restart=may_restart)
        needed = filter(self._needs, self._sessions)
        found = [(each.host.name, each.error) for each in needed if each.error is not None]
        if not found:
            return None
        host, error = found[0]  # all launchers may report the same one
        if len(found) < len(self._sessions):
            error.message = f"host {host}: {error.message}"
        return error

    @property
    def _launched(self) -> list[HostSession]:
        """The hosts whose launchers have not ended."""
        return [each for each in self._sessions if each.phase is HostPhase.LAUNCHED]

    @property
    def result(self) -> LaunchResult | None:
        """The result of the launch, if there is one."""
        return None if self._phase is ControllerPhase.CONNECTING else self._first.result

    def _start(self, unusable: Mapping[int, HostFailure]) -> None:
        """Start a launcher on each usable host."""
        for number, why in unusable.items():
            is_excluded = why.host in self._excluded
            (self._retry.exclude if is_excluded else self._retry.add)(self._sessions[number], why)
        usable = [each for each in self._sessions if each.phase is HostPhase.READY]
        self._rendezvous, self._first = self._connector.open_endpoint(usable), usable[0]
        placed = usable[: self._request.nnodes]
        self._present = [session.host.name for session in placed]
        if len(placed) > 1:
            self._places = {session.number: rank for rank, session in enumerate(placed)}
        for session in usable:
            self._start_on(session)
        self._phase = ControllerPhase.RUNNING

    def _start_on(self, session: HostSession) -> None:
        node_rank = self._places.get(session.number)
        place = [] if node_rank is None else ["--node-rank", str(node_rank)]
        quiet = "" if session is self._first else " quiet"
        session.launch(
            StartLauncher(
                words=[*self._rendezvous, *self._workers_on(session), *place, *self._words],
                env={
                    **self._env,
                    **devices_of(session.host),
                    HOSTS_PRESENT: f"{','.join(self._present)}{quiet}",
                },
                listens=session.endpoint is not None,
            )
        )

    def _workers_on(self, session: HostSession) -> list[str]:
        nproc = self._request.nproc_per_node
        if isinstance(nproc, tuple) and not self._policy.keeps_places:
            is_listed = session.number < len(nproc)
            nproc = nproc[session.number] if is_listed else session.host.workers
        workers = (nproc,) if isinstance(nproc, int) else nproc
        if isinstance(workers, tuple):
            return ["--nproc-per-node", ",".join(map(str, workers))]
        return []

    def _forward_signals(self) -> None:
        for signum in self._signals.take():
            if signum == signal.SIGTSTP and self._pause.has_caller:
                self._console.note("SIGTSTP: suspending the ranks until `fg` or SIGCONT")
                self._signal_all(signal.SIGTSTP)
                self._console.leave_terminal()
                suspend_foreground()
                continue
            if signum == signal.SIGCONT and signum not in self._request.forwarded_signals:
                continue
            self._forwarded.add(signum)
            if signum in self._request.stop_signals:
                if self._stopped is None:
                    self._stopped = StoppedBySignal(signum)
                    self._stopped_s = self._pool.reactor.now_s()
                    # The first host passes it on to the others, unless it cannot.
                    limit_s = self._most_s_to_end
                    end = partial(self._enter, ControllerPhase.ENDING)
                    self._pool.reactor.call_later(limit_s, end)
                self._pool.record_stop()
                self._retry.close()
            for session in self._launched:
                # Once all nodes have joined, node 0 forwards what concerns all of them.
                for_itself = session is self._first or signum in self._request.forwarded_signals
                session.send(SignalLauncher(signum=signum, even_if_joined=for_itself))

    def _suspend_ranks(self) -> None:
        """Suspend the ranks for as long as the shell's process is suspended."""
        self._pause.begin(until_sigcont=False)
        self._signal_all(signal.SIGTSTP)

    def _resume_ranks(self) -> None:
        self._pause.end()
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, signum: int) -> None:
        for session in self._launched:
            session.send(SignalLauncher(signum=signum, even_if_joined=True))

    def _check_hosts(self) -> None:
        """Handle hosts that have exited or are lost: stop the others, or continue without them."""
        for session in self._launched:
            if (why := self._why_lost(session)) is not None:
                self._lose(HostFailure(session.host.name, why), session)
            elif session.ended is not None:
                self._handle_exit(session, session.ended.code)
        self._retry.check()
        self._console.note_lost_output()
        if self._console.reader_is_gone:
            self._enter(ControllerPhase.ENDING)

    def _handle_exit(self, session: HostSession, code: int) -> None:
        """Handle the end of a launcher."""
        session.hang_up()
        if self._exclude(session, code):
            return
        if self._can_spare(session):
            if code:
                how = f"code {code}" if code > 0 else signal_name(-code)
                trouble = _trouble(session)
                why = trouble.message if trouble else f"its launcher exited with {how}"
                self._retry.add(session, HostFailure(session.host.name, why), report=False)
            return
        if code or self._policy.ends_with_first:
            self._enter(ControllerPhase.CLOSING)
        if session.error is not None and not self._last_errors.is_pending:
            self._last_errors.restart(_OTHERS_REPORT_S)

    def _exclude(self, session: HostSession, code: int) -> bool:
        """Return whether a launcher found its host unfit, and the launch continues without it."""
        trouble = _trouble(session)
        if not isinstance(trouble, NodeExcludedError) or code != trouble.exit_code:
            return False
        why = HostFailure(session.host.name, trouble.message)
        self._excluded[why.host] = why.why
        if self._can_spare(session):
            self._retry.exclude(session, why)
            return True
        left = len(self._sessions) - len(self._excluded)
        if self._phase is not ControllerPhase.RUNNING or left < self._connector.least:
            return False
        self._lose(why, session)  # it is the first one, without which the others restart
        return True

    def _why_lost(self, session: HostSession) -> str | None:
        """Return why a host is lost, if its launcher did not exit normally."""
        if (ended := session.ended) is not None:
            own = (*self._request.stop_signals, signal.SIGPIPE)
            is_running = self._phase is ControllerPhase.RUNNING
            others_know = ended.has_joined or self._stopped is not None or not is_running
            is_stopped = -ended.code in own and others_know
            if ended.code < 0 and not is_stopped and self._phase not in _STOPS:
                return f"its launcher was killed by {signal_name(-ended.code)}"
            return ended.why or None
        if session.is_closed:
            return session.finish().why
        silent_s = self._pool.listened - session.received
        if silent_s > self._request.rendezvous.node_timeout_s:
            return f"no message from it for {silent_s:.0f} s"
        if self._phase is not ControllerPhase.RUNNING and not self._deadline.is_pending:
            return "it did not exit with the other hosts"
        return None

    def _needs(self, session: HostSession) -> bool:
        """Return whether the launch fails without a host."""
        return self._policy.needs_all or session is self._first

    def _can_spare(self, session: HostSession) -> bool:
        """Return whether the launch may continue without a host."""
        return self._phase is ControllerPhase.RUNNING and not self._needs(session)

    def _lose(self, why: HostFailure, session: HostSession) -> None:
        if self._can_spare(session):
            self._retry.add(session, why)
            return
        is_needed = self._needs(session) or self._first.ended is None  # there is no result yet
        if not is_needed or not self._lost:
            self._console.note(f"host {why.host} was lost: {why.why}")
        session.close()
        if is_needed:
            self._lost_s = self._lost_s or self._pool.reactor.now_s()
            self._lost.append(why)
            is_running = self._phase is ControllerPhase.RUNNING
            self._enter(self._policy.after_loss if is_running else ControllerPhase.ENDING)

    def _enter(self, phase: ControllerPhase) -> None:
        """End the launch: wait for the other hosts, or stop them."""
        if self._phase is phase or self._phase in _STOPS:
            return
        if self._phase is ControllerPhase.RUNNING:
            self._retry.close()
            self._deadline.restart(self._most_s_to_end)
        self._phase = phase
        if phase in _STOPS or self._policy.ends_with_first:
            # For the launchers' messages to each other.
            why = f"host {self._lost[0].host} was lost" if self._lost else "the launch has ended"
            for session in self._launched:  # one that has come back may not have joined the first
                session.send(StopLauncher(why=why, even_if_joined=phase in _STOPS))

    @property
    def _most_s_to_end(self) -> float:
        return self._request.shutdown_timeout_s + self._request.rendezvous.node_timeout_s + _GRACE_S


def _trouble(session: HostSession) -> MeshrunError | None:
    """Return why a launcher could not launch or ended; ``None`` if another host is to blame."""
    if session.error is not None or session.result is None:
        return session.error
    return None if session.result.elsewhere else session.result.trouble
