"""The zygote's loop: receives orders from the launcher, starts processes and reports on them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TextIO

from meshrun.errors import HostError
from meshrun.host import rank_variables as var
from meshrun.host.cores import bind_to_cpus
from meshrun.host.descriptors import empty_stdin
from meshrun.host.network import packet_pair
from meshrun.host.own_variables import WORKER_PID
from meshrun.host.process_state import is_exiting, is_stopped
from meshrun.host.processes import (
    EndedChildren,
    die_with_parent,
    end_children,
    release_traced,
    send_signal,
    send_signal_to_group,
    signals_blocked,
)
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import TOO_FEW_PROCESSES
from meshrun.host.stderr import note
from meshrun.plan.rank_program import Program, first_path
from meshrun.protocol import codec
from meshrun.protocol.rank_end import RankExited
from meshrun.protocol.result import signal_name
from meshrun.protocol.zygote_messages import (
    STORE,
    EndGeneration,
    Exit,
    GenerationEnded,
    LeftoversEnded,
    Negotiate,
    NegotiationFailed,
    RankReady,
    RanksResumed,
    RankStarted,
    ResumeRanks,
    SignalRanks,
    StartFailed,
    StartRank,
    StartStore,
    StoreEnded,
    SuspendRanks,
)
from meshrun.start import own_command
from meshrun.zygote.control import LEFT_TO_LAUNCHER, is_hung_up, launcher_pid, receive, send
from meshrun.zygote.store import Guard, run_store

_EXIT_TAKES_S = 0.5
"""How long helper processes of ranks may take to exit by themselves."""
_CHECK_LAUNCHER_EVERY_S = 0.5
_HINTS = {
    errno.ENOEXEC: "the file of a command begins with a line such as `#!/bin/sh`",
    errno.ENOENT: "the first line of the file names an interpreter that does not exist",
}
"""What to try if a command that exists cannot be executed."""


class ZygoteServer:
    """The children of the zygote: the store process, and one process per rank."""

    def __init__(
        self,
        *,
        control: socket.socket,
        reports: socket.socket,
        program: Program,
        become_rank: Callable[..., None],
        fresh: bool,
        dispositions: dict[int, Any],
        guard: Guard,
    ) -> None:
        self._barrier_fd = -1
        self._guard = guard
        self._dispositions = dispositions
        self._control = control
        self._reports = reports
        self._program = program
        self._become_rank = become_rank
        self._fresh = fresh
        self._pids: dict[int, int] = {}
        self._signalled: set[int] = set()
        """Processes that were sent a signal while they were running."""
        self._stopped: set[int] = set()
        """Processes of ranks that this one has stopped."""
        self._stopped_ns = 0
        self._is_suspended = False
        """Whether the launcher has ordered ranks to stay stopped, even while it runs itself."""
        self._store_pid: int | None = None
        self._negotiation_pid: int | None = None
        # Unlike epoll, poll has no descriptor that children would inherit.
        self._reactor = Reactor(selector=selectors.PollSelector())
        self._is_zygote = True
        self._in_child: Callable[[], None] | None = None
        """In a forked child, the function that it is to run."""
        self._parent = os.getppid()

    def serve(self) -> Callable[[], None]:
        """Follow orders until the launcher ends; return only in a forked child."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # From now on there may be children to kill. If the parent dies while this process is
        # stopped, SIGCONT wakes it, and it finds the socket closed.
        die_with_parent(self._parent, signal.SIGCONT)
        launcher = launcher_pid(self._control) or self._parent
        self._reactor.on_signal(self._reap)
        self._reactor.add_reader(self._control, self._receive_order)
        self._reactor.every(_CHECK_LAUNCHER_EVERY_S, partial(self._check_launcher, launcher))
        while self._in_child is None:
            self._reactor.turn()
        return self._in_child

    def _check_launcher(self, launcher: int) -> None:
        """Stop ranks while the launcher is stopped: nothing else reports a SIGSTOP to it.

        On macOS, nothing else reports its death either.
        """
        if sys.platform == "darwin" and os.getppid() != self._parent:
            self._end(0.0, launcher_is_gone=True)
        if not self._pids:
            return
        if is_stopped(launcher):
            self._suspend_ranks()
        elif not self._is_suspended:
            self._resume_ranks()

    def _receive_order(self) -> None:
        order, fds = receive(self._control)
        match order:
            case StartRank():
                self._start_rank(order, fds)
            case StartStore():
                self._fork_store(fds)
            case Negotiate():
                self._fork_negotiation(order)
            case SignalRanks():
                self._signal(order)
            case SuspendRanks():
                self._is_suspended = True
                self._suspend_ranks()
            case ResumeRanks():
                self._is_suspended = False
                self._resume_ranks()
            case EndGeneration():
                self._end_generation(order.grace_s)
            case Exit():
                self._end(order.grace_s)
            case _:
                self._end(0.0, launcher_is_gone=True)

    # ---- children --------------------------------------------------------------------------

    def _start_rank(self, order: StartRank, fds: list[int]) -> None:
        try:
            if self._program.kind == "command":
                pid = spawn_command(order, self._program, *fds[:2])
            elif self._fresh:
                pid = spawn_fresh(order, self._program, self._reports, self._barrier_fd, fds)
            else:
                pid = self._fork(self._dispositions, die_with_parent)
                if pid == 0:
                    self._in_child = self._in_rank(order, *fds)
                    return
        except OSError as error:
            self._report_failed_start(order.rank, error)
            return
        finally:
            if self._is_zygote:
                for fd in fds:
                    os.close(fd)
        self._pids[pid] = order.rank
        send(self._control, RankStarted(rank=order.rank, pid=pid, at_ns=time.monotonic_ns()))
        if self._program.kind == "command":  # which reports nothing itself
            send(self._control, RankReady(rank=order.rank, at_ns=time.monotonic_ns()))

    def _fork(self, dispositions: dict[int, Any], begin: Callable[[int], None]) -> int:
        """Fork with signals blocked, so that none reaches the child while it has our handlers.

        Args:
            dispositions: Signal dispositions of the child.
            begin: Called in the child with our process id, to make it end after us.
        """
        zygote = os.getpid()
        with signals_blocked((signal.SIGCHLD, *LEFT_TO_LAUNCHER)):
            pid = os.fork()
            if pid == 0:
                self._is_zygote = False
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for signum, disposition in dispositions.items():
                    signal.signal(signum, disposition)
                os.setsid()
                begin(zygote)
                self._reactor.close()
                self._control.close()
        return pid

    def _in_rank(
        self, order: StartRank, stdout: int, stderr: int, stacks: int, requests: int
    ) -> Callable[[], None]:
        if order.debug:
            os.dup2(stdout, 0)
        elif not order.stdin:
            empty_stdin()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in (stdout, stderr):
            os.close(fd)
        for stream in (sys.__stdout__, sys.__stderr__):
            _reopen(stream)
        return partial(
            self._become_rank,
            order,
            reports=self._reports,
            barrier_fd=self._barrier_fd,
            stacks_fd=stacks,
            requests_fd=requests,
        )

    def _fork_store(self, fds: list[int]) -> None:
        self._end_negotiation()
        barrier_fd, *listeners = fds
        if self._barrier_fd >= 0:
            os.close(self._barrier_fd)
        self._barrier_fd = barrier_fd
        self._store_pid = self._fork_helper(self._guard.begin)
        if self._store_pid == 0:
            self._reports.close()
            self._in_child = partial(run_store, listeners, self._guard)
            return
        for listen_fd in listeners:
            os.close(listen_fd)

    def _fork_negotiation(self, order: Negotiate) -> None:
        self._negotiation_pid = self._fork_helper(die_with_parent)
        if self._negotiation_pid == 0:
            from meshrun.rendezvous.torch_backend import negotiate

            self._in_child = partial(negotiate, order, self._reports, first_path(self._program))

    def _fork_helper(self, begin: Callable[[int], None]) -> int | None:
        """Fork a process that keeps our handlers: signals that end ranks must not end it first."""
        try:
            return self._fork({}, begin)
        except OSError as error:
            self._report_failed_start(STORE, error)
            return None

    def _report_failed_start(self, rank: int, error: OSError) -> None:
        """Report an error of a new process; in the child, exit, as only the zygote reports."""
        if not self._is_zygote:
            what = f"cannot use `{error.filename}`" if error.filename else "cannot start"
            note(f"{what}: {error.strerror}")
            os._exit(HostError.exit_code)
        reason, hint = error.strerror or str(error), _HINTS.get(error.errno or 0, TOO_FEW_PROCESSES)
        now_ns = time.monotonic_ns()
        send(self._control, StartFailed(rank=rank, error=reason, hint=hint, at_ns=now_ns))

    def _end_negotiation(self) -> None:
        _kill_child(self._negotiation_pid)
        self._negotiation_pid = None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                release_traced(pid, os.WSTOPSIG(status))
                continue
            now_ns = time.monotonic_ns()
            rank = self._pids.pop(pid, None)
            if rank is not None:
                unasked = pid not in self._signalled
                event = RankExited(
                    rank=rank, pid=pid, wait_status=status, at_ns=now_ns, unasked=unasked
                )
                send(self._control, event)
            elif pid == self._negotiation_pid:
                self._negotiation_pid = None
                if os.WIFSIGNALED(status):
                    what = f"its process was killed by {signal_name(os.WTERMSIG(status))}"
                    send(self._reports, NegotiationFailed(text=what))
            elif pid == self._store_pid:
                self._store_pid = None
                send(self._control, StoreEnded(wait_status=status, at_ns=now_ns))

    def _signal(self, order: SignalRanks) -> None:
        ranks = set(order.ranks)
        for pid, rank in self._pids.items():
            if rank in ranks:
                if not is_exiting(pid):
                    self._signalled.add(pid)
                (send_signal_to_group if order.whole_group else send_signal)(pid, order.signum)
                if order.signum == signal.SIGTERM:
                    send_signal(pid, signal.SIGCONT)  # a stopped rank cannot end

    def _suspend_ranks(self) -> None:
        if not self._stopped:
            self._stopped_ns = time.monotonic_ns()
        for pid in self._pids.keys() - self._stopped:
            if not is_stopped(pid):  # else another process stopped it
                self._stopped.add(pid)
                send_signal_to_group(pid, signal.SIGSTOP)

    def _resume_ranks(self) -> None:
        for pid in self._stopped & self._pids.keys():
            send_signal_to_group(pid, signal.SIGCONT)
        if self._stopped:
            self._stopped.clear()
            stopped_ns = time.monotonic_ns() - self._stopped_ns
            send(self._control, RanksResumed(stopped_ns=stopped_ns))

    def _end_generation(self, grace_s: float) -> None:
        """End the store and everything that a generation of ranks left behind."""
        self._end_negotiation()
        ended = self._end_children(grace_s)
        self._end_store()
        self._pids.clear()
        self._signalled.clear()
        self._report_leftovers(ended)
        send(self._control, GenerationEnded(at_ns=time.monotonic_ns()))

    def _end(self, grace_s: float, *, launcher_is_gone: bool = False) -> NoReturn:
        """End the store and everything that ranks left behind, then this process."""
        self._end_negotiation()
        ended = self._end_children(grace_s)
        if launcher_is_gone or is_hung_up(self._control):  # that may have been killed meanwhile
            self._guard.kill_orphans()
            self._guard.remove_scratch()
            if os.getppid() == self._parent:  # a shim, which waits for our end and may be stopped
                send_signal(self._parent, signal.SIGCONT)
        else:
            self._report_leftovers(ended)
        self._end_store()  # last, as it would take over if this process were killed
        os._exit(0)

    def _report_leftovers(self, ended: EndedChildren) -> None:
        if ended.count or ended.denied:
            event = LeftoversEnded(
                count=ended.killed, survivors=list(ended.survivors), denied=list(ended.denied)
            )
            send(self._control, event)

    def _end_children(self, grace_s: float) -> EndedChildren:
        """End what ranks left behind, but not the store process, which guards the launch."""
        spare = frozenset() if self._store_pid is None else frozenset({self._store_pid})
        return end_children(grace_s=grace_s, delay_s=_EXIT_TAKES_S if grace_s else 0.0, spare=spare)

    def _end_store(self) -> None:
        _kill_child(self._store_pid)
        self._store_pid = None


def _kill_child(pid: int | None) -> None:
    if pid is not None:
        send_signal(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _reopen(stream: TextIO | None) -> None:
    """Have a stream forget what our output was: it would seek in a pipe as in our file."""
    with contextlib.suppress(ValueError):  # a module has closed or detached it
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.FileIO):
            file = io.FileIO(stream.fileno(), "w", closefd=False)
            file.name = stream.name
            io.TextIOWrapper.__init__(
                stream, file, stream.encoding, stream.errors, "\n", write_through=True
            )


def spawn_fresh(
    order: StartRank, program: Program, reports: socket.socket, barrier_fd: int, fds: Sequence[int]
) -> int:
    """Start a rank as a new interpreter, which reads its order, and return its process id."""
    ours, theirs = packet_pair()  # a pipe is too small for the longest order
    stdout, stderr, stacks, requests = fds
    inherited = (theirs.fileno(), reports.fileno(), barrier_fd, stacks, requests)
    numbers = [str(number) for number in (*inherited, os.getpid())]
    with ours, theirs:
        ours.send(codec.encode(order))
        command = own_command("rank", *numbers, *program.words, unbuffered=True)
        return _start(order, command, stdout, stderr, pass_fds=inherited)


def spawn_command(order: StartRank, program: Program, stdout: int, stderr: int) -> int:
    """Start a rank that is a command and return its process id."""
    program = program.for_local_rank(order.local_rank)
    zygote = os.getpid()

    def prepare() -> None:  # between fork and exec; this process has a single thread
        die_with_parent(zygote)
        bind_to_cpus(order.cpus)

    return _start(order, [program.target, *program.args], stdout, stderr, preexec_fn=prepare)


def _start(
    order: StartRank, command: Sequence[str], stdout: int, stderr: int, **options: Any
) -> int:
    stdin = stdout if order.debug else None if order.stdin else subprocess.DEVNULL
    removed = {*var.THREADS, WORKER_PID}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    process = subprocess.Popen(
        command,
        stdin=stdin,  # the terminal of a rank that is debugged is its stdout
        stdout=stdout,
        stderr=stderr,
        env={**kept, **order.environment},  # for sitecustomize and readers of /proc/PID/environ
        start_new_session=True,
        **options,
    )
    process.returncode = 0  # reaped by the loop, with all other children
    return process.pid
