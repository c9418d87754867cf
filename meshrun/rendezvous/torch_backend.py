"""Finds node 0 through torch's own rendezvous, in a separate process.

It only determines which node is node 0 and where its launcher listens; the launchers do the rest.
torch's handlers start threads, so they cannot run in the zygote.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from msgspec.structs import replace

from meshrun.errors import RendezvousError
from meshrun.host.host_names import is_address
from meshrun.host.network import is_unspecified, own_address_towards
from meshrun.host.processes import set_title
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.protocol import codec
from meshrun.protocol.packing import pack, unpack
from meshrun.protocol.zygote_messages import (
    Negotiate,
    Negotiated,
    NegotiationFailed,
    NegotiationWaits,
    NodeInfo,
)
from meshrun.rendezvous.expected_nodes import natural
from meshrun.rendezvous.hub import FIRST_NOTE_S, NOTE_EVERY_S
from meshrun.rendezvous.torch_handler import make_handler
from meshrun.rendezvous.torch_withdrawal import read, store_of, watch_for_withdrawals
from meshrun.wording import count

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

_ANSWERS_S = 3.0
"""How long the machine of node 0 may take to accept a connection."""


def negotiate(order: Negotiate, reports: socket.socket, program_path: str | None) -> NoReturn:
    """Join the other nodes, report it, and wait to be killed: others may still read the store.

    A backend imports nothing from ``program_path``, the folder of the ranks' program.
    """
    if sys.path[:1] == [program_path]:
        del sys.path[0]
    set_title("rendezvous", order.backend)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torch opens another to everyone
    began = time.monotonic()
    last = "no other node responded"

    def note(text: str) -> None:
        nonlocal last
        last = text
        waited = f" ({time.monotonic() - began:.0f} of {order.timeout_s:.0f} s)"
        _report(reports, NegotiationWaits(text=text + waited))

    def fail(text: str, **hint: str) -> None:
        _report(reports, NegotiationFailed(text=text, **hint))

    try:
        handler = make_handler(order)
        store = store_of(handler)
        _report(reports, find_running(order, store) or _join(order, handler, store, reports, note))
        if hasattr(handler, "_stop_heartbeats"):  # they log errors as soon as the host exits
            handler._stop_heartbeats()
    except BaseException as error:
        if type(error).__name__ == "RendezvousTimeoutError":
            fail(f"after {time.monotonic() - began:.0f} s: {last}"[:2000])
        else:
            fail(_describe(error)[:2000], hint=_hint(order, error))
    while True:
        signal.pause()


def _join(
    order: Negotiate,
    handler: Any,
    store: Store | None,
    reports: socket.socket,
    note: Callable[[str], None],
) -> Negotiated:
    done = threading.Event()
    _in_background(_note_wait, order, done, note)
    _in_background(watch_for_withdrawals, order, handler, done, partial(_report, reports))
    found = handler.next_rendezvous()
    done.set()
    joined = _exchange(order, found)
    if joined.node_rank == 0:
        announce_running(order, store, joined.coordinator)
    return joined


def _hint(order: Negotiate, error: BaseException) -> str:
    """Return what to try after an error other than a timeout."""
    if isinstance(error, RendezvousError) and error.hint:
        return error.hint
    place = format_endpoint(order.endpoint_host, order.endpoint_port)
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    missing = [each for each in causes if isinstance(each, ImportError)]
    if missing and order.backend.startswith("etcd"):
        return "torch needs it for this backend: pip install python-etcd urllib3"
    if missing:
        return f"--rdzv-backend {order.backend} requires this module"
    return f"check that {order.backend} is running at {place}, and that this node can reach it"


def _in_background(run: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=run, args=args, daemon=True).start()


def _describe(error: BaseException) -> str:
    if isinstance(error, RendezvousError):
        return error.message
    cause = error.__cause__
    because = f" ({_describe(cause)})" if cause is not None else ""
    return f"{type(error).__name__}: {error}".strip(": ") + because


def _report(reports: socket.socket, event: Any) -> None:
    with contextlib.suppress(OSError):
        reports.send(codec.encode(event))


def _note_wait(order: Negotiate, done: threading.Event, note: Callable[[str], None]) -> None:
    wait_s = FIRST_NOTE_S
    while not done.wait(wait_s):
        wait_s = NOTE_EVERY_S
        place = format_endpoint(order.endpoint_host, order.endpoint_port)
        few = "" if order.least_nodes == order.nnodes else "at least "
        nodes = f"{few}{count(order.least_nodes, 'node')}"
        note(f"waiting for {nodes} through {order.backend} at {place}")


def _exchange(order: Negotiate, found: RendezvousInfo) -> Negotiated:
    """Publish where this node's launcher listens, and learn which node is node 0."""
    from torch.distributed import PrefixStore

    store, rank, world_size = found.store, found.rank, found.world_size
    store = PrefixStore("meshrun/node-info", store)
    info = NodeInfo(
        host=order.host,
        address=order.address,
        port=order.port,
        secret=secrets.token_hex(16),
    )
    store.set(str(rank), pack(info).decode())
    infos = [read_info(store.get(str(other)), str(other)) for other in range(world_size)]
    ranks = sorted(range(world_size), key=lambda other: (natural(infos[other].host), other))
    coordinator = infos[ranks[0]]
    # It may not know which of its addresses the others reach.
    if is_unspecified(address := coordinator.address):
        if rank == ranks[0]:
            known = [each.address for each in infos if not is_unspecified(each.address)]
            seen = [own_address_towards(each) or address for each in known]
            store.set("coordinator", (*seen, address)[0])
        if not is_address(address := store.get("coordinator").decode(errors="replace")):
            raise _foreign(address.encode(), "coordinator", "an address")
        coordinator = replace(coordinator, address=address)
    return Negotiated(node_rank=ranks.index(rank), nnodes=world_size, coordinator=coordinator)


def read_info(text: bytes, key: str) -> NodeInfo:
    """Return the node's entry in ``text``, which torch's store has under ``key``.

    Raises:
        RendezvousError: If it is not an entry.
    """
    try:
        return cast("NodeInfo", unpack(text, NodeInfo))
    except ValueError as error:
        raise _foreign(text, key, "a node's address") from error


def _foreign(text: bytes, key: str, wanted: str) -> RendezvousError:
    """Return the error for a value that no launcher wrote."""
    return RendezvousError(
        f"torch's store holds {text[:40]!r} under `{key}`, expected {wanted}",
        hint="something else may be writing to that store, such as a node with another version of"
        " meshrun",
    )


def announce_running(order: Negotiate, store: Store | None, own: NodeInfo) -> None:
    """Write where this node, node 0, listens, for nodes that start later."""
    if store is not None:
        with contextlib.suppress(Exception):  # the launch can do without it
            store.set(_running_key(order), pack(own).decode())


def find_running(order: Negotiate, store: Store | None) -> Negotiated | None:
    """Return where node 0 of this launch listens, if the launch is already running.

    Otherwise, nodes that are started again would only meet each other, and run the program a second
    time beside the nodes that are left.
    """
    key = _running_key(order)
    with contextlib.suppress(Exception):  # somebody else wrote it, or node 0 is gone
        if store is not None and (text := read(store, key)):
            info = read_info(text, key)
            socket.create_connection((info.address, info.port), timeout=_ANSWERS_S).close()
            return Negotiated(node_rank=None, nnodes=order.nnodes, coordinator=info)
    return None


def _running_key(order: Negotiate) -> str:
    return f"meshrun/{order.run_id}/running"
