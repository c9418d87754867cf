"""The shim of a zygote that a warm server has forked: its parent in place of the launcher.

As containerd's for a container, it does not depend on the server. It gives the zygote what it would
inherit from the launcher. When the zygote ends, the shim adopts and ends what is left, and reports
to the launcher.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from meshrun.host import processes
from meshrun.host.process_state import SignalState, signal_state
from meshrun.host.reactor import Reactor
from meshrun.plan.rank_program import Program
from meshrun.protocol.packing import pack, unpack
from meshrun.warm.warm_messages import FDS, ZygoteEnded, ZygoteForked, ZygoteSpec
from meshrun.zygote.control import leave_signals_to_launcher

RunZygote = Callable[[Sequence[int], Program], Callable[[], None]]
_REQUEST_TAKES_S = 10.0


def serve_connection(
    connection: socket.socket, mark: processes.EnvironVariable, run: RunZygote
) -> Callable[[], Callable[[], None]]:
    """Receive a request for a zygote, become its shim, and fork it.

    ``mark`` is the variable that marks processes of a launch.

    Returns:
        The function that the zygote is to run; the shim itself never returns.
    """
    connection.settimeout(_REQUEST_TAKES_S)
    try:
        _, fds, _, _ = socket.recv_fds(connection, 1, FDS)
        if len(fds) != FDS:
            os._exit(0)
        text = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
        spec: ZygoteSpec = unpack(text, ZygoteSpec)
        os.setsid()
        spec.inherited.apply(fds[1])
        mark.set(spec.mark)
    except (OSError, ValueError):
        os._exit(1)
    processes.become_subreaper()
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        processes.die_with_parent(shim)
        os.close(fds[0])
        os.close(fds[1])
        os.setsid()
        for standard, fd in enumerate(fds[2:5]):
            os.dup2(fd, standard)
            os.close(fd)
        return partial(run, fds[5:], spec.program)
    leave_signals_to_launcher()
    processes.set_title("shim", spec.program.target, *spec.program.args)
    for fd in fds:
        os.close(fd)
    os.chdir("/")
    zygote_pidfd = processes.open_pidfd(pid)
    connection.settimeout(None)
    shim_pidfd = processes.open_pidfd(shim)
    _send(connection, ZygoteForked(pid=pid), zygote_pidfd, shim_pidfd)
    os.close(shim_pidfd)
    _keep(connection, pid, zygote_pidfd)
    os._exit(0)


def _keep(connection: socket.socket, pid: int, pidfd: int) -> None:
    """Wait for the zygote's end and report it; if the launcher ends first, wake or kill it."""
    with Reactor() as reactor:

        def outlive_launcher() -> None:
            reactor.remove(connection)  # closed, as the launcher sends nothing at this point
            # A stopped zygote cannot notice the launcher's end, nor can one that imports: that one
            # does not handle SIGCHLD yet, and has nothing to clean up.
            imports = signal_state(pid, signal.SIGCHLD) is SignalState.UNHANDLED
            processes.send_signal(pid, signal.SIGKILL if imports else signal.SIGCONT)

        reactor.add_reader(connection, outlive_launcher)
        reactor.add_reader(pidfd, partial(reactor.remove, pidfd))
        reactor.run_until(lambda: pidfd not in reactor.watched)
    _, status = os.waitpid(pid, 0)
    # Spare the guard, which has work to do if the launcher is killed too.
    left = processes.end_children(
        grace_s=0.0, spare=frozenset(filter(processes.is_guard, processes.list_children()))
    )
    message = ZygoteEnded(
        wait_status=status, survivors=list(left.survivors), denied=list(left.denied)
    )
    _send(connection, message)
    with suppress(OSError):
        if connection.recv(1):  # the launcher is alive, so no guard is needed
            processes.end_children(grace_s=0.0, spare=frozenset(left.survivors))


def _send(connection: socket.socket, message: ZygoteForked | ZygoteEnded, *fds: int) -> None:
    try:
        socket.send_fds(connection, [pack(message)], fds)
    except OSError:  # the launcher is dead
        pass
