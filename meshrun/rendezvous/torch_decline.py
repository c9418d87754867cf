"""Tells nodes that wait in torch's rendezvous that this one failed, through torch's store.

    start.py decline < a Negotiate and a GaveUp, one a line

That takes torch, which the launcher has not, so it is a process of its own. What it writes changes
all the time: a text that stays is of a launch before, on a server that outlived it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from meshrun.host.processes import die_with_parent
from meshrun.host.reactor import Reactor
from meshrun.host.title import set_title
from meshrun.protocol import codec
from meshrun.protocol.codec import Negotiate
from meshrun.protocol.from_zygote import GaveUp
from meshrun.rendezvous.messages import MessageError, decode, encode
from meshrun.start import own_command

if TYPE_CHECKING:
    from torch.distributed import Store

_EVERY_S = 0.3


class DeclineProcess:
    """The process, as the launcher sees it.

    Args:
        reactor: Has a turn once the process has exited.
    """

    def __init__(self, order: Negotiate, notice: GaveUp, reactor: Reactor) -> None:
        self._reactor = reactor
        self._process = subprocess.Popen(
            own_command("decline"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        lines, self._said = (
            cast("IO[bytes]", pipe) for pipe in (self._process.stdin, self._process.stdout)
        )
        with contextlib.suppress(OSError), lines:
            lines.write(codec.encode(order) + b"\n" + encode(notice) + b"\n")
        reactor.add_reader(self._said, self._read)

    def _read(self) -> None:
        if not os.read(self._said.fileno(), 4096):
            self.close()

    @property
    def all_notified(self) -> bool:
        """Whether all have heard it, or it cannot be told."""
        return self._said.closed

    def close(self) -> None:
        """Tell nobody any more."""
        self._reactor.remove(self._said)
        self._said.close()
        self._process.kill()
        self._process.wait()


def main(_known_at_start: object = None) -> None:
    """Say it until all others have heard it, or the launcher has had enough of it."""
    from meshrun.rendezvous.torch_handler import make_handler

    die_with_parent(os.getppid())
    set_title("decline")
    order = cast("Negotiate", codec.decode(sys.stdin.buffer.readline().strip()))
    text = sys.stdin.buffer.readline().strip().decode()
    store = store_of(make_handler(order))
    if store is None:
        return
    key, told = _keys(order)
    before, drawn = store.add(told, 0), secrets.token_hex(4)
    for count in itertools.count():
        store.set(key, f"{drawn}.{count} {text}")
        if store.add(told, 0) - before >= order.nnodes - 1:
            return
        time.sleep(_EVERY_S)


def watch_for_declines(
    order: Negotiate, handler: Any, done: threading.Event, tell: Callable[[GaveUp], None]
) -> None:
    """While torch's rendezvous waits: call ``tell`` once a node says that it gives up."""
    with contextlib.suppress(Exception):  # the rendezvous itself tells what is wrong with the store
        if (store := store_of(handler)) is None:
            return
        key, told = _keys(order)
        first = read(store, key)
        while not done.wait(_EVERY_S):
            if (text := read(store, key)) in (b"", first):
                continue
            with contextlib.suppress(MessageError):
                notice = decode(text.partition(b" ")[2])
                if isinstance(notice, GaveUp):
                    tell(notice)
                    store.add(told, 1)
                    return


def store_of(handler: Any) -> Store | None:
    """Return the store that nodes meet through, before they have met; ``None`` if it has none.

    torch has no public name for it (2.13).
    """
    store = getattr(handler, "_store", None)
    if store is not None:
        with contextlib.suppress(Exception):  # not every kind can be
            store = store.clone()
        return cast("Store", store)
    rendezvous: Any = getattr(handler, "_rdzv_impl", None)
    if not hasattr(rendezvous, "client"):
        return None
    from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

    return EtcdStore(rendezvous.client, rendezvous.get_path("/meshrun"))


def _keys(order: Negotiate) -> tuple[str, str]:
    """Return where it is said, and where those that have heard it are counted."""
    return f"meshrun/{order.run_id}/gave up", f"meshrun/{order.run_id}/told"


def read(store: Store, key: str) -> bytes:
    """Return what stands under ``key``; nothing if nothing does."""
    with contextlib.suppress(Exception):  # etcd's fails if there is no key at all
        return store.get(key) if store.check([key]) else b""
    return b""
