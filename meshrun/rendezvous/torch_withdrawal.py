"""Notifies nodes that wait in torch's rendezvous that this one withdraws, through torch's store.

    start.py withdraw LAUNCHER_PID < a Negotiate and a Withdraw, one per line

This needs torch, which the launcher does not import, so it runs in a separate process. The text
that it writes changes constantly: one that does not is left over from an earlier launch.
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
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, cast

from meshrun.host.processes import die_with_parent, set_title
from meshrun.host.reactor import Reactor
from meshrun.protocol import codec
from meshrun.protocol.generation import Withdraw
from meshrun.protocol.zygote_messages import Negotiate
from meshrun.rendezvous.messages import MessageError, decode, encode
from meshrun.start import own_command

if TYPE_CHECKING:
    from torch.distributed import Store

_EVERY_S = 0.3
"""A store can wait until a key is set, but not until its value or the counter changes."""


class WithdrawalProcess:
    """The process, as the launcher sees it."""

    def __init__(self, order: Negotiate, notice: Withdraw, reactor: Reactor) -> None:
        self._reactor = reactor
        self._process = subprocess.Popen(
            own_command("withdraw", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        lines, self._output = (
            cast("IO[bytes]", pipe) for pipe in (self._process.stdin, self._process.stdout)
        )
        with contextlib.suppress(OSError), lines:
            lines.write(codec.encode(order) + b"\n" + encode(notice) + b"\n")
        self.imports_torch = True
        """Whether it has not begun to notify the other nodes."""
        reactor.add_reader(self._output, self._read)

    def _read(self) -> None:
        self.imports_torch = False
        if not os.read(self._output.fileno(), 4096):
            self.close()

    @property
    def all_notified(self) -> bool:
        """Whether all nodes have received the notice, or none can."""
        return self._output.closed

    def close(self) -> None:
        """Kill the process."""
        self._reactor.drop(self._output)
        self._process.kill()
        self._process.wait()


def main(_known_at_start: object = None) -> None:
    """Write the notice until all other nodes have received it, or the launcher kills us."""
    die_with_parent(int(sys.argv[1]))
    from meshrun.rendezvous.torch_handler import make_handler

    set_title("withdraw")
    order = cast("Negotiate", codec.decode(sys.stdin.buffer.readline().strip()))
    text = sys.stdin.buffer.readline().strip().decode()
    import_module("torch.distributed.elastic.rendezvous.registry")
    os.write(sys.stdout.fileno(), b"imported torch\n")
    store = store_of(make_handler(order))
    if store is None:
        return
    key, counter = _keys(order)
    before, nonce = store.add(counter, 0), secrets.token_hex(4)
    for count in itertools.count():
        store.set(key, f"{nonce}.{count} {text}")
        if store.add(counter, 0) - before >= order.nnodes - 1:
            return
        time.sleep(_EVERY_S)


def watch_for_withdrawals(
    order: Negotiate, handler: Any, done: threading.Event, report: Callable[[Withdraw], None]
) -> None:
    """Call ``report`` if a node withdraws while torch's rendezvous waits."""
    with contextlib.suppress(Exception):  # the rendezvous itself reports errors of the store
        if (store := store_of(handler)) is None:
            return
        key, counter = _keys(order)
        first = read(store, key)
        while not done.wait(_EVERY_S):
            if (text := read(store, key)) in (b"", first):
                continue
            with contextlib.suppress(MessageError):
                notice = decode(text.partition(b" ")[2])
                if isinstance(notice, Withdraw):
                    report(notice)
                    store.add(counter, 1)
                    return


def store_of(handler: Any) -> Store | None:
    """Return the store through which a handler's nodes meet; ``None`` if it has none.

    torch has no public name for it (2.13).
    """
    store = getattr(handler, "_store", None)
    if store is not None:
        with contextlib.suppress(Exception):  # not every kind of store can
            store = store.clone()
        return cast("Store", store)
    rendezvous: Any = getattr(handler, "_rdzv_impl", None)
    if not hasattr(rendezvous, "client"):
        return None
    from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

    return EtcdStore(rendezvous.client, rendezvous.get_path("/meshrun"))


def _keys(order: Negotiate) -> tuple[str, str]:
    """Return the keys of the notice, and of the count of nodes that have received it."""
    return f"meshrun/{order.run_id}/withdrawn", f"meshrun/{order.run_id}/notified"


def read(store: Store, key: str) -> bytes:
    """Return the value under ``key``; empty if there is none."""
    with contextlib.suppress(Exception):  # etcd's fails if there is no key at all
        return store.get(key) if store.check([key]) else b""
    return b""
