"""The zygote's loop: orders from the launcher in, forks and news of them out."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, NoReturn

from meshrun import wire
from meshrun.child.ending import Ending
from meshrun.child.rank import become_rank
from meshrun.child.spawn import spawn_command, spawn_fresh
from meshrun.events import (
    FromZygote,
    GenerationEnded,
    LeftoversEnded,
    RankExited,
    RankReady,
    RankStarted,
    StartFailed,
    StoreEnded,
)
from meshrun.host.processes import (
    Ended,
    die_with_parent,
    end_children,
    send_signal,
    send_signal_to_group,
)
from meshrun.request import Program
from meshrun.wire import ClearUp, Finish, SignalRanks, StartRank, StartStore

_FDS_PER_PACKET = 3
_PATIENCE_S = 0.5
_BLOCKED = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_LEFT_TO_LAUNCHER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def send(control: socket.socket, event: FromZygote | RankReady) -> None:
    """Tell the launcher; if it is gone, its end of the socket says so to the loop."""
    try:
        control.send(wire.encode(event))
    except (BrokenPipeError, ConnectionError):
        pass


def receive(control: socket.socket, fds: list[int] | None = None) -> wire.Message | None:
    """Return the next order, or ``None`` once the launcher is gone."""
    try:
        packet, received, _, _ = socket.recv_fds(control, wire.PACKET_BYTES, _FDS_PER_PACKET)
    except ConnectionError:
        return None
    if fds is not None:
        fds.extend(received)
    return wire.decode(packet) if packet else None


def leave_signals_to_launcher() -> dict[int, Any]:
    """Outlive signals sent to the whole job; return the dispositions that ranks get back.

    Schedulers and terminals signal every process, and the launcher decides what follows. A
    handler that does nothing, unlike SIG_IGN, is not passed on to what a rank executes.
    """
    before: dict[int, Any] = {}
    for signum in _LEFT_TO_LAUNCHER:
        before[signum] = signal.getsignal(signum)
        if before[signum] != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, lambda *_: None)
    return before


class Forks:
    """The children of the zygote: the store, and one process a rank."""

    def __init__(
        self,
        *,
        control: socket.socket,
        reports: socket.socket,
        program: Program,
        code: CodeType | None,
        fresh: bool,
        ending: Ending,
        dispositions: dict[int, Any],
        scratch_dir: str,
    ) -> None:
        self._gate_fd = -1
        self._scratch_dir = scratch_dir
        self._dispositions = dispositions
        self._control = control
        self._reports = reports
        self._program = program
        self._code = code
        self._fresh = fresh
        self._ending = ending
        self._pids: dict[int, int] = {}
        self._store_pid: int | None = None
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    def serve(self) -> Callable[[], None]:
        """Follow orders until the launcher is done or gone; return only in a forked rank."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # There may be children to end from now on: wake, even if stopped, and see the socket close.
        die_with_parent(os.getppid(), signal.SIGCONT)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._control.fileno() in ready:
                fds: list[int] = []
                order = receive(self._control, fds)
                child = self._follow(order, fds)
                if child is not None:
                    return child

    def _follow(self, order: wire.Message | None, fds: list[int]) -> Callable[[], None] | None:
        match order:
            case StartRank():
                return self._start_rank(order, fds)
            case StartStore():
                return self._fork_store(order, fds)
            case SignalRanks():
                self._signal(order)
            case ClearUp():
                self._clear_up(order.grace_s)
            case Finish():
                self._end(order.grace_s)
            case _:
                self._end(0.0, launcher_is_gone=True)
        return None

    # ---- children --------------------------------------------------------------------------

    def _start_rank(self, order: StartRank, fds: list[int]) -> Callable[[], None] | None:
        try:
            if self._program.kind == "command":
                pid = spawn_command(order, self._program, *fds[:2])
            elif self._fresh:
                pid = spawn_fresh(order, self._program, self._reports, self._gate_fd, *fds)
            else:
                pid = self._fork(self._dispositions)
                if pid == 0:
                    return self._in_rank(order, *fds)
        except OSError as error:
            now_ns = time.monotonic_ns()
            send(self._control, StartFailed(rank=order.rank, error=str(error), at_ns=now_ns))
            return None
        finally:
            if self._is_zygote():
                for fd in fds:
                    os.close(fd)
        self._pids[pid] = order.rank
        send(self._control, RankStarted(rank=order.rank, pid=pid, at_ns=time.monotonic_ns()))
        if self._program.kind == "command":  # which tells nothing of itself
            send(self._control, RankReady(rank=order.rank, at_ns=time.monotonic_ns()))
        return None

    def _fork(self, dispositions: dict[int, Any]) -> int:
        """Fork with signals held back, so that none meets the child with our handlers."""
        zygote = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        pid = os.fork()
        if pid == 0:
            self._is_zygote = lambda: False  # type: ignore[method-assign]
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for signum, disposition in dispositions.items():
                signal.signal(signum, disposition)
            os.setsid()
            die_with_parent(zygote)
            self._control.close()
            os.close(self._woken)
            os.close(self._wake)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        return pid

    def _is_zygote(self) -> bool:
        return True

    def _in_rank(
        self, order: StartRank, stdout: int, stderr: int, stacks: int
    ) -> Callable[[], None]:
        if order.debug == "here":
            os.dup2(stdout, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in (stdout, stderr):
            os.close(fd)
        return partial(
            become_rank,
            order,
            program=self._program,
            code=self._code,
            reports=self._reports,
            ending=self._ending,
            gate_fd=self._gate_fd,
            stacks_fd=stacks,
        )

    def _fork_store(self, order: StartStore, fds: list[int]) -> Callable[[], None] | None:
        pid = self._fork({})  # it outlives what ends ranks, for them to end in order
        if pid == 0:
            return partial(_be_store, order.port, fds[0])
        os.close(fds[0])
        if self._gate_fd >= 0:
            os.close(self._gate_fd)
        self._gate_fd = fds[1]
        self._store_pid = pid
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            now_ns = time.monotonic_ns()
            rank = self._pids.pop(pid, None)
            if rank is not None:
                event = RankExited(rank=rank, pid=pid, wait_status=status, at_ns=now_ns)
                send(self._control, event)
            elif pid == self._store_pid:
                self._store_pid = None
                send(self._control, StoreEnded(wait_status=status, at_ns=now_ns))

    def _signal(self, order: SignalRanks) -> None:
        ranks = set(order.ranks)
        for pid, rank in self._pids.items():
            if rank in ranks:
                (send_signal_to_group if order.whole_group else send_signal)(pid, order.signum)
                if order.signum == signal.SIGTERM:
                    send_signal(pid, signal.SIGCONT)  # a stopped rank cannot end

    def _clear_up(self, grace_s: float) -> None:
        """End the store and whatever a generation of ranks left behind."""
        ended = self._end_children(grace_s)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._pids.clear()
        self._store_pid = None
        if ended.count:
            send(self._control, LeftoversEnded(count=ended.count))
        send(self._control, GenerationEnded(at_ns=time.monotonic_ns()))

    def _end(self, grace_s: float, *, launcher_is_gone: bool = False) -> NoReturn:
        """End the store and whatever ranks left behind, then this process."""
        ended = self._end_children(grace_s)
        if launcher_is_gone and self._scratch_dir:
            shutil.rmtree(self._scratch_dir, ignore_errors=True)
        elif ended.count:
            send(self._control, LeftoversEnded(count=ended.count))
        os._exit(0)

    def _end_children(self, grace_s: float) -> Ended:
        if self._store_pid is not None:
            send_signal(self._store_pid, signal.SIGKILL)
            try:
                os.waitpid(self._store_pid, 0)
            except ChildProcessError:
                pass
        return end_children(grace_s=grace_s, patience_s=_PATIENCE_S if grace_s else 0.0)


def _be_store(port: int, listen_fd: int) -> NoReturn:
    """Serve the store until the zygote ends this process or ends itself."""
    from meshrun.child.join import serve_store

    store = serve_store(port, listen_fd)
    while store is not None:
        signal.pause()
    os._exit(0)
