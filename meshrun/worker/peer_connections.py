"""Closes a rank's connections to its peers with the rank, even if others inherited them.

A peer learns of a rank's end as the kernel closes its sockets, which it does only once no process
has them open: a daemon that the rank forked would leave peers waiting forever. gloo's sockets are
those that its event loop waits for; the loop's own descriptor, unlike Python's, survives an exec.
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
"""O_CLOEXEC as /proc shows it, for descriptors too (proc_pid_fdinfo(5))."""
_WAITED_FOR = re.compile(r"^tfd:\s*(\d+)(?:.*\bino:\s*([0-9a-f]+))?", re.MULTILINE)


def end_connections_with_rank(reporter: Reporter) -> None:
    """In a rank: have children without its connections, and end them as this process leaves."""
    rank, leave = os.getpid(), os._exit

    def end_connections_and_leave(status: int) -> None:
        if os.getpid() == rank and (connections := list(_connections())):
            if status == 0:
                reporter.tell(RankFinished)
            for fd in connections:
                _shut_down(fd)
        leave(status)

    os._exit = end_connections_and_leave  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_let_go)


def close_connections_on_exec() -> None:
    """Have no program that this process starts inherit the connections that it has by now.

    A rank that exits through C's ``exit`` cannot shut them down. With many groups
    only the latest is looked at, whose descriptors have the highest numbers.
    """
    descriptors = sorted(_descriptors(), reverse=True)
    inherited = {fd for fd in descriptors if _is_inherited_socket(fd)}
    for fd in descriptors:
        if not inherited:
            return
        for connection in _waited_for(fd):
            os.set_inheritable(connection, False)
            inherited.discard(connection)


def _is_inherited_socket(fd: int) -> bool:
    try:
        return os.get_inheritable(fd) and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # closed meanwhile
        return False


def _shut_down(fd: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # gloo's thread would not bear the end of one that listens
        connection.shutdown(socket.SHUT_RDWR)


def _let_go() -> None:
    """Put something harmless in their place: what would close them here may be yet to come."""
    for fd in _connections():
        with contextlib.suppress(OSError):
            harmless = os.open(os.devnull, os.O_RDWR)
            os.dup2(harmless, fd, inheritable=False)
            os.close(harmless)


def _connections() -> Iterator[int]:
    if "torch.distributed" in sys.modules:
        for fd in _descriptors():
            yield from _waited_for(fd)


def _descriptors() -> list[int]:
    try:
        return [int(fd) for fd in os.listdir("/proc/self/fd")]
    except OSError:  # no /proc, or no descriptors left
        return []


def _waited_for(fd: int) -> Iterator[int]:
    """Yield the sockets that gloo waits for with a descriptor, if it does with this one."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventpoll]":
            return
        with open(f"/proc/self/fdinfo/{fd}") as file:
            text = file.read()
        flags = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
        if flags is None or int(flags[1], 8) & _CLOSED_BY_EXEC:
            return
        for number, inode in _WAITED_FOR.findall(text):
            link = os.readlink(f"/proc/self/fd/{number}")
            if link.startswith("socket:") and (not inode or link == f"socket:[{int(inode, 16)}]"):
                yield int(number)
