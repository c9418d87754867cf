"""Keeps a process group alive until neither torch nor a peer needs it.

This avoids two races in torch, both of which affect everyday programs.

The destructor of a gloo group joins the group's threads, which need the interpreter's lock to free
what a backward pass left with them. Python's own references to a group release the lock first;
those of DDP's ``Reducer`` do not, so a group that dies with its model deadlocks. meshrun leaves the
last reference to Python. Source: ``ProcessGroupGloo.cpp`` and ``init.cpp`` of torch 2.13.

A group may be ready on one rank while another is still connecting it. If the first destroys it
then, the other fails ("connectFullMesh"). A destroyed group therefore keeps its connections as long
as a finished rank does, or until the next group has connected.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from meshrun.worker.peer_connections import close_connections_on_exec
from meshrun.worker.torch_version import check_torch_version

PEERS_TAKE_S = 5.0
"""How long connections outlive their use, for peers that are a little behind."""
THREAD = "meshrun: groups"
"""The name of the thread that closes them then."""


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
