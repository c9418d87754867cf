"""Closes a rank's connections to its peers when the rank ends, even if others inherited them.

A peer notices a rank's end when the kernel closes the rank's sockets, which it does only once no
process has them open: a daemon that the rank forked would leave peers waiting forever. gloo's
sockets are those in its epoll set, whose descriptor, unlike that of Python's, survives an exec.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator

from meshrun.protocol.from_zygote import RankFinished
from meshrun.worker.reporter import Reporter

_CLOSED_BY_EXEC = 0o2000000
"""O_CLOEXEC as /proc shows it (proc_pid_fdinfo(5))."""
_EPOLL_ENTRY = re.compile(r"^tfd:\s*(\d+)(?:.*\bino:\s*([0-9a-f]+))?", re.MULTILINE)


def end_connections_with_rank(reporter: Reporter) -> None:
    """Shut down this rank's connections when it leaves, and drop them in its forks."""
    rank, leave = os.getpid(), os._exit

    def end_connections_and_leave(status: int) -> None:
        if os.getpid() == rank and (connections := list(_connections())):
            if status == 0:
                reporter.report(RankFinished)
            for fd in connections:
                _shut_down(fd)
        leave(status)

    os._exit = end_connections_and_leave  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_replace_connections)


def close_connections_on_exec() -> None:
    """Keep programs that this process starts from inheriting its current connections.

    A rank that exits through C's ``exit`` cannot shut them down. With many groups, only the latest
    is examined, whose descriptors have the highest numbers.
    """
    descriptors = sorted(_descriptors(), reverse=True)
    inherited = {fd for fd in descriptors if _is_inherited_socket(fd)}
    for fd in descriptors:
        if not inherited:
            return
        for connection in _sockets_in_epoll(fd):
            os.set_inheritable(connection, False)
            inherited.discard(connection)


def _is_inherited_socket(fd: int) -> bool:
    try:
        return os.get_inheritable(fd) and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # closed meanwhile
        return False


def _shut_down(fd: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # not a listening one, whose end gloo's thread would not survive
        connection.shutdown(socket.SHUT_RDWR)


def _replace_connections() -> None:
    """Replace the connections in a fork, where later code may still close their descriptors."""
    for fd in _connections():
        with contextlib.suppress(OSError):
            harmless = os.open(os.devnull, os.O_RDWR)
            os.dup2(harmless, fd, inheritable=False)
            os.close(harmless)


def _connections() -> Iterator[int]:
    if "torch.distributed" in sys.modules:
        for fd in _descriptors():
            yield from _sockets_in_epoll(fd)


def _descriptors() -> list[int]:
    try:
        return [int(fd) for fd in os.listdir("/proc/self/fd")]
    except OSError:  # no /proc, or no descriptors left
        return []


def _sockets_in_epoll(fd: int) -> Iterator[int]:
    """Yield the sockets in the epoll set of a descriptor, if it is one of gloo's."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventpoll]":
            return
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            text = file.read()
        flags = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
        if flags is None or int(flags[1], 8) & _CLOSED_BY_EXEC:
            return
        for number, inode in _EPOLL_ENTRY.findall(text):
            link = os.readlink(f"/proc/self/fd/{number}")
            if link.startswith("socket:") and (not inode or link == f"socket:[{int(inode, 16)}]"):
                yield int(number)
