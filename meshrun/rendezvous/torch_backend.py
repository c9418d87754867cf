"""Nodes that do not know each other meet through torch's own rendezvous, in a process for that.

What they learn of each other there is who the first node is and where its launcher listens; all
else the launchers tell each other. torch's handlers have threads, so none lives in the zygote.
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
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NoReturn

from meshrun.errors import RendezvousError
from meshrun.host.interfaces import address_in, is_address, own_address_towards
from meshrun.host.name_service import names_from_files_only
from meshrun.host.title import set_title
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.protocol import codec
from meshrun.protocol.codec import Negotiate
from meshrun.protocol.events import Negotiated, NegotiationFailed, NegotiationWaits
from meshrun.rendezvous.endpoint_key import EndpointKey, late_at
from meshrun.rendezvous.expected_nodes import natural
from meshrun.rendezvous.handshake import LONGEST_LINE
from meshrun.rendezvous.node_info import NodeInfo, foreign, read_info
from meshrun.rendezvous.pickle_filter import read_own_types_only
from meshrun.rendezvous.polling import quicken
from meshrun.rendezvous.store_clock import follow_clock, share_clock

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

_TELL_EVERY_S = 5.0
_TELL_FIRST_S = 3.0
_LINE_TAKES_S = 0.2
_ASK_EVERY_S = 0.1
_ASK_TIMES = 50


def negotiate(
    order: Negotiate, fds: list[int], reports: socket.socket, program_path: str | None
) -> NoReturn:
    """Meet the other nodes, tell the launcher, and stay until ended: others may still be reading.

    Args:
        order: How to meet.
        fds: The socket for torch's store, where this machine is its host.
        reports: Where the launcher hears of it.
        program_path: The folder of what the ranks run; a back end imports nothing from there.
    """
    if sys.path[:1] == [program_path]:
        del sys.path[0]
    set_title("rendezvous", order.backend)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torch makes another, open to all
    began = time.monotonic()
    last = "nothing was heard of other nodes"

    def say(text: str) -> None:
        nonlocal last
        last = text
        waited = f" ({time.monotonic() - began:.0f} of {order.timeout_s:.0f} s)"
        _tell(reports, NegotiationWaits(text=text + waited))

    def fail(text: str, **hint: str) -> None:
        _tell(reports, NegotiationFailed(text=text, at_ns=time.monotonic_ns(), **hint))

    changed = partial(_tell_changed, order, reports, set())
    try:
        read_own_types_only()
        done = threading.Event()
        way = _Way(order, done, partial(_go_late, reports))
        handler, arrivals = _handler(order, fds, say, way, done=done, changed=changed)
        is_open = arrivals is not None and order.is_elastic
        quicken(handler, order.nnodes)
        sign = EndpointKey(arrivals, nnodes=order.nnodes) if is_open else None
        if sign is not None and (late := sign.read()) is not None:
            done.set()
            _tell(reports, late)
            _stay()
        arrivals = _arrive(order, arrivals)
        _in_background(_tell_who_waits, order, arrivals, done, say)
        if sign is not None:
            _in_background(sign.watch, done, partial(_go_late, reports))
        found = handler.next_rendezvous()
        done.set()
        _tell(reports, _exchange(order, found, sign, changed, is_host=bool(fds)))
        if hasattr(handler, "_stop_heartbeats"):  # they would complain as soon as the host ends
            handler._stop_heartbeats()
    except BaseException as error:
        if type(error).__name__ == "RendezvousTimeoutError":
            fail(f"after {time.monotonic() - began:.0f} s: {last}"[:2000])
        else:
            way.wait()
            fail(_describe(error)[:2000], hint=_hint(order, error))
    _stay()


def _arrive(order: Negotiate, arrivals: Store | None) -> Store | None:
    """Say in torch's store who has come, for people; return that part of it."""
    if arrivals is None:
        return None
    arrivals = arrivals.clone()  # torch closes a connection on a count that is none
    with contextlib.suppress(Exception):
        arrivals.set(f"host {arrivals.add('count', 1)}", order.host)
    return arrivals


def _tell_changed(order: Negotiate, reports: socket.socket, told: set[str], key: str) -> None:
    """Say once for a key that somebody else has written there."""
    if key in told:
        return
    told.add(key)
    place = format_endpoint(order.endpoint_host, order.endpoint_port)
    text = f"something else has written to torch's store at {place}, under `{key}`"
    _tell(reports, NegotiationWaits(text=f"{text}; it is written again"))


def _hint(order: Negotiate, error: BaseException) -> str:
    """Return what to try after an error that is not for want of other nodes."""
    if isinstance(error, RendezvousError) and error.hint:
        return error.hint
    place = format_endpoint(order.endpoint_host, order.endpoint_port)
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    missing = [each for each in causes if isinstance(each, ImportError)]
    if missing and order.backend.startswith("etcd"):
        return "torch needs it for this back end: pip install python-etcd urllib3"
    if missing:
        return f"--rdzv-backend {order.backend} needs this module"
    if isinstance(error, TimeoutError):
        return f"was meshrun started on the machine of {place}? can this node reach it?"
    return f"does {order.backend} serve at {place}, and can this node reach it?"


def _stay() -> NoReturn:
    while True:
        signal.pause()


def _in_background(run: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=run, args=args, daemon=True).start()


def _go_late(reports: socket.socket, late: Negotiated) -> None:
    """Nobody will come to torch's next round: the launcher goes to the first node's door."""
    _tell(reports, late)
    os._exit(0)


def _describe(error: BaseException) -> str:
    if isinstance(error, RendezvousError):
        return error.message
    cause = error.__cause__
    because = f" ({_describe(cause)})" if cause is not None else ""
    return f"{type(error).__name__}: {error}".strip(": ") + because


def _tell(reports: socket.socket, event: Any) -> None:
    with contextlib.suppress(OSError):
        reports.send(codec.encode(event))


def _handler(
    order: Negotiate,
    fds: list[int],
    say: Any,
    way: _Way,
    *,
    done: threading.Event,
    changed: Callable[[str], None],
) -> tuple[Any, Store | None]:
    """Return torch's handler, and a part of its store to say who has arrived, if there is one."""
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import (
        _register_default_handlers,
        _register_out_of_tree_handlers,
        get_rendezvous_handler,
    )

    params = RendezvousParameters(
        backend=order.backend,
        endpoint=format_endpoint(order.endpoint_host, order.endpoint_port),
        run_id=order.run_id,
        min_nodes=order.least_nodes,
        max_nodes=order.nnodes,
        local_addr=order.address,
        **order.conf,
    )
    if order.backend != "c10d" or order.conf.get("store_type", "tcp") != "tcp":
        with contextlib.suppress(Exception):
            _register_default_handlers()
            _register_out_of_tree_handlers()
        return get_rendezvous_handler(params), None
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = _store(order, fds, say, way)
    backend = C10dRendezvousBackend(store, order.run_id)
    arrivals = PrefixStore(f"meshrun/{order.run_id}", store)
    if fds:
        share_clock(arrivals, threading.Event() if order.is_elastic else done, changed)
    else:
        follow_clock(arrivals)
    return create_handler(store, backend, params), arrivals


def _store(order: Negotiate, fds: list[int], say: Any, way: _Way) -> Store:
    """Return the store that c10d meets on: served here, on the one address that was bound."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    # It is how long torch tries to connect, too; the meeting may not last as long.
    timeout_s = min(float(order.conf.get("read_timeout", 60)), order.timeout_s)
    timeout = timedelta(seconds=timeout_s)
    host = order.address
    if not fds:
        connection = _reach(order, say)
        host = address_in(connection.getpeername())
        way.hear(connection)
    with names_from_files_only():
        return TCPStore(
            host,
            order.endpoint_port,
            is_master=bool(fds),
            timeout=timeout,
            wait_for_workers=False,
            **({"master_listen_fd": fds[0]} if fds else {}),
        )


class _Way:
    """What is heard at the endpoint of c10d: a store says nothing by itself, a launcher does.

    It stands in the store's place once all have met, and says where the first node is. A node
    that the store has left behind asks again there.
    """

    def __init__(
        self, order: Negotiate, done: threading.Event, go: Callable[[Negotiated], None]
    ) -> None:
        self._order, self._done, self._go = order, done, go
        self._hearing: threading.Thread | None = None
        self._is_gone = threading.Event()
        """Set once the store has closed the connection."""

    def hear(self, connection: socket.socket) -> None:
        """Listen from now on; give a launcher that stands there time to say its line."""
        self._hearing = threading.Thread(target=self._hear, args=(connection,), daemon=True)
        self._hearing.start()
        self._is_gone.wait(_LINE_TAKES_S)

    def wait(self) -> None:
        """After an error: the store may have gone because all have met, which is heard soon."""
        if self._hearing is not None and self._is_gone.wait(_LINE_TAKES_S):
            self._hearing.join()

    def _hear(self, connection: socket.socket) -> None:
        for _ in range(_ASK_TIMES):
            with contextlib.suppress(OSError), connection:
                if said := connection.makefile("rb").readline(LONGEST_LINE):
                    with contextlib.suppress(RendezvousError):
                        info = read_info(said, "the endpoint")
                        self._go(late_at(info, nnodes=self._order.nnodes))
            self._is_gone.set()
            if self._done.wait(_ASK_EVERY_S):
                return
            try:
                place = (self._order.endpoint_host, self._order.endpoint_port)
                connection = socket.create_connection(place, timeout=_ASK_TIMES * _ASK_EVERY_S)
            except OSError:
                return


def _reach(order: Negotiate, say: Any) -> socket.socket:
    """Return a connection to the store's host, once it answers."""
    deadline = time.monotonic() + order.timeout_s
    next_word = time.monotonic() + _TELL_FIRST_S
    while True:
        try:
            place = (order.endpoint_host, order.endpoint_port)
            connection = socket.create_connection(place, timeout=5)
            connection.settimeout(None)
            return connection
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer at {format_endpoint(*place)}: {why}")
        if time.monotonic() > next_word:
            next_word += _TELL_EVERY_S
            say(f"waiting for {format_endpoint(*place)}: {why}")
        time.sleep(0.2)


def _tell_who_waits(
    order: Negotiate, arrivals: Store | None, done: threading.Event, say: Any
) -> None:
    wait_s = _TELL_FIRST_S
    while not done.wait(wait_s):
        wait_s = _TELL_EVERY_S
        place = format_endpoint(order.endpoint_host, order.endpoint_port)
        few = "" if order.least_nodes == order.nnodes else "at least "
        text = f"waiting for {few}{order.least_nodes} nodes through {order.backend} at {place}"
        if arrivals is not None:
            with contextlib.suppress(Exception):
                count = arrivals.add("count", 0)
                hosts = [arrivals.get(f"host {n}").decode() for n in range(1, min(count, 8) + 1)]
                text = f"waiting at {place}: {count} of {few}{order.least_nodes} nodes joined"
                text += f" ({', '.join(hosts)}{', ...' if count > len(hosts) else ''})"
        say(text)


def _exchange(
    order: Negotiate,
    found: RendezvousInfo,
    sign: EndpointKey | None,
    changed: Callable[[str], None],
    *,
    is_host: bool,
) -> Negotiated:
    """Tell the others where this node's launcher listens, and learn who is the first."""
    from torch.distributed import PrefixStore

    store, rank, world_size = found.store, found.rank, found.world_size
    store = PrefixStore("meshrun/cards", store)
    info = NodeInfo(
        host=order.host,
        is_host=is_host,
        address=order.address,
        port=order.port,
        secret=secrets.token_hex(16),
    )
    store.set(str(rank), info.to_text())
    infos = [read_info(store.get(str(other)), str(other)) for other in range(world_size)]
    ranks = sorted(
        range(world_size),
        key=lambda other: (not infos[other].is_host, natural(infos[other].host), other),
    )
    coordinator = infos[ranks[0]]
    address = coordinator.address
    if _is_everywhere(address):  # it could not tell which of its addresses the others see
        if rank == ranks[0]:
            known = [each.address for each in infos if not _is_everywhere(each.address)]
            seen = [own_address_towards(each) or address for each in known]
            store.set("head", (*seen, address)[0])
        if not is_address(address := store.get("head").decode(errors="replace")):
            raise foreign(address.encode(), "head", "an address")
    if sign is not None:
        late = sign.put_up(info, changed) if ranks[0] == rank else sign.compare(coordinator)
        if late is not None:
            return late
    return Negotiated(
        node_rank=ranks.index(rank),
        nnodes=world_size,
        coordinator_host=coordinator.host,
        coordinator_address=address,
        coordinator_port=coordinator.port,
        secret=coordinator.secret,
        at_ns=time.monotonic_ns(),
    )


def _is_everywhere(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_unspecified
