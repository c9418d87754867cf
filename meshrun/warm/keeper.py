"""The keeper of a zygote that a warm server has forked: its parent in the launcher's stead.

It gives the zygote what it would have from the launcher, adopts what the zygote's end leaves over,
ends that, and tells the launcher. The server may be killed meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from meshrun.host.environ_variable import EnvironVariable
from meshrun.host.processes import (
    become_subreaper,
    die_with_parent,
    end_children,
    is_guard,
    list_children,
    send_signal,
)
from meshrun.host.title import set_title
from meshrun.plan.rank_program import Program
from meshrun.warm.warm_messages import (
    FDS,
    Charge,
    StartZygote,
    ZygoteEnded,
    ZygoteForked,
    decode,
)
from meshrun.warm.warm_messages import encode as encoded
from meshrun.worker.exit import Ending
from meshrun.zygote.control import leave_signals_to_launcher
from meshrun.zygote.main import run_zygote

_ASKED_WITHIN_S = 10.0
_PACKET = 4096
_LONGEST = 64 * 1024 * 1024


def serve_connection(
    connection: socket.socket,
    mark: EnvironVariable,
    ending: Ending,
    known_at_start: frozenset[str],
) -> Callable[[], Callable[[], None]]:
    """Do in this process what the other end of a connection asks for.

    Args:
        connection: From a process of this user's that may do what this one may.
        mark: Of the launch, as this process shows it.
        ending: Of the interpreter, for a rank that is forked from here.
        known_at_start: Modules that a new interpreter has before its program.

    Returns:
        What the zygote is to run; in the keeper itself it never returns.
    """
    connection.settimeout(_ASKED_WITHIN_S)
    try:
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET, FDS)
        message = decode(packet)
        if not isinstance(message, StartZygote) or len(fds) != FDS:
            os._exit(0)
        charge = decode(_whole(fds[0]))
        assert isinstance(charge, Charge)  # noqa: S101 - the launcher wrote it
        os.setsid()
        charge.inherited.take_on(fds[1])
        mark.set(charge.mark)
    except (OSError, ValueError, AssertionError):
        os._exit(1)
    become_subreaper()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        die_with_parent(keeper)
        os.close(fds[0])
        os.close(fds[1])
        return _zygote(charge, fds[2:], ending, known_at_start)
    leave_signals_to_launcher()
    set_title("keeper", charge.target, *charge.args)
    for fd in fds:
        os.close(fd)
    os.chdir("/")
    process = os.pidfd_open(pid)
    connection.settimeout(None)
    itself = os.pidfd_open(keeper)
    _tell(connection, ZygoteForked(pid=pid), process, itself)
    os.close(itself)
    _keep(connection, pid, process)
    os._exit(0)


def _zygote(
    charge: Charge, fds: list[int], ending: Ending, known_at_start: frozenset[str]
) -> Callable[[], Callable[[], None]]:
    os.setsid()
    for standard, fd in enumerate(fds[:3]):
        os.dup2(fd, standard)
        os.close(fd)
    control, reports, stacks = fds[3:]
    program = Program(kind=charge.kind, target=charge.target, args=tuple(charge.args))
    return partial(
        run_zygote,
        socket.socket(fileno=control),
        socket.socket(fileno=reports),
        stacks,
        program,
        ending=ending,
        known_at_start=known_at_start,
    )


def _keep(connection: socket.socket, pid: int, process: int) -> None:
    """Wait for the zygote's end, and wake it should the launcher end first."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while process not in dict(poll.poll()):
        poll.unregister(connection)  # which says nothing more, so it was closed
        send_signal(pid, signal.SIGCONT)  # a stopped process would not see the end either
    _, status = os.waitpid(pid, 0)
    # Should the launcher be killed too, the guard has something to do.
    left = end_children(grace_s=0.0, spare=frozenset(filter(is_guard, list_children())))
    message = ZygoteEnded(
        wait_status=status, survivors=list(left.survivors), denied=list(left.denied)
    )
    _tell(connection, message)
    with suppress(OSError):
        if connection.recv(_PACKET):  # the launcher lives
            end_children(grace_s=0.0)


def _tell(connection: socket.socket, message: ZygoteForked | ZygoteEnded, *fds: int) -> None:
    try:
        socket.send_fds(connection, [encoded(message)], fds)
    except OSError:  # the launcher is dead
        pass


def _whole(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > _LONGEST:
        raise ValueError(f"{size} bytes")
    return os.pread(fd, size, 0)
