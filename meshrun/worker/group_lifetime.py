"""Keeps a process group's connections until neither torch nor a peer needs them, and no longer.

This avoids two races in torch, both of which affect everyday programs.

The destructor of a gloo group joins the group's threads, which need the interpreter's lock to free
what a backward pass left with them. Python's own references to a group release the lock first;
those of DDP's ``Reducer`` do not, so a group that dies with its model deadlocks. meshrun leaves the
last reference to Python. Source: ``ProcessGroupGloo.cpp`` and ``init.cpp`` of torch 2.13.

A group may be ready on one rank while another is still connecting it. If the first destroys it
then, the other fails ("connectFullMesh"). A destroyed group therefore keeps its connections as long
as a finished rank does, or until the next group has connected.

A peer notices a rank's end when the kernel closes the rank's sockets, which it does only once no
process has them open: a daemon that the rank forked would leave peers waiting forever. gloo's
sockets are those in its epoll set, whose descriptor, unlike that of Python's, survives an exec.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from typing import Any

from meshrun.protocol.zygote_messages import RankFinished
from meshrun.worker.imports import check_torch_version
from meshrun.worker.reporter import Reporter

PEERS_TAKE_S = 5.0
"""How long connections outlive their use, for peers that are a little behind."""
THREAD = "meshrun: groups"
"""The name of the thread that closes them then."""
_CLOSED_BY_EXEC = 0o2000000
"""O_CLOEXEC as /proc shows it (proc_pid_fdinfo(5))."""
_EPOLL_ENTRY = re.compile(r"^tfd:\s*(\d+)(?:.*\bino:\s*([0-9a-f]+))?", re.MULTILINE)


class _Destroyed:
    """Groups that this program has destroyed, but whose connections are still open."""

    def __init__(self) -> None:
        self.any_connected = False
        """Whether this process, or its parent before the fork, has ever had a group."""
        self._groups: list[Any] = []
        self._pid = 0
        self._timer: threading.Timer | None = None

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group: Any) -> None:
        self._pid = os.getpid()
        self._groups.append(group)
        self.hold()
        self._timer = threading.Timer(PEERS_TAKE_S, self.close)
        self._timer.daemon, self._timer.name = True, THREAD
        with suppress(RuntimeError):  # Python 3.12 starts no thread while it ends
            self._timer.start()

    def hold(self) -> None:
        """Keep their connections until this process ends."""
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Close their connections; not in a fork, which does not have the groups' threads."""
        if self._pid == os.getpid():
            self.hold()
            self._groups.clear()


destroyed = _Destroyed()


def guard_groups() -> None:
    """Have torch's process groups live as long as they are needed; call this once."""
    from torch._C import _distributed_c10d as c10d

    check_torch_version()
    for holder in (c10d.Reducer, getattr(c10d, "Logger", None)):  # a Logger holds a Reducer
        if holder is not None:
            _keep_alive(holder, (c10d.ProcessGroup, c10d.Reducer))
    call_around(c10d.ProcessGroup, "shutdown", before=destroyed.add)
    call_around(c10d.ProcessGroup, "_register_backend", after=_connected)


def _connected(_: Any) -> None:
    destroyed.any_connected = True
    destroyed.close()
    close_connections_on_exec()


def _keep_alive(holder: type, kinds: tuple[type, ...]) -> None:
    """Have Python refer to the arguments of a ``holder`` until its C++ part is gone.

    pybind11 clears weak references to an object after its C++ part (``clear_instance``).
    """
    make = holder.__init__  # type: ignore[misc]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        held = [thing for thing in (*args, *kwargs.values()) if isinstance(thing, kinds)]
        weakref.finalize(self, held.clear).atexit = False

    holder.__init__ = __init__  # type: ignore[misc]


def call_around(
    owner: type,
    name: str,
    *,
    before: Callable[[Any], None] = lambda _: None,
    after: Callable[[Any], None] = lambda _: None,
) -> Callable[[], None]:
    """Have calls of a method pass its object to ``before`` and ``after``.

    Returns:
        A function after which they no longer do, unless the method has been replaced since.
    """
    method = getattr(owner, name)

    @wraps(method)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = method(self, *args, **kwargs)
        after(self)
        return result

    setattr(owner, name, around)

    def undo() -> None:
        if getattr(owner, name) is around:
            setattr(owner, name, method)

    return undo


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
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # not a listening one, whose end gloo's thread would not survive
        connection.shutdown(socket.SHUT_RDWR)


def _replace_connections() -> None:
    """Replace the connections in a fork, where later code may still close their descriptors."""
    for fd in _connections():
        with suppress(OSError):
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
    with suppress(OSError):
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
