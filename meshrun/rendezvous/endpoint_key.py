"""Where the first node of an elastic launch lets in those that come later, told in torch's store.

torch's rendezvous is over by then, and its next round would not do: a node that comes later reads
this and goes to the first node's launcher.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshrun.errors import RendezvousError
from meshrun.protocol.events import Negotiated
from meshrun.rendezvous.node_info import NodeInfo, read_info

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "door"
_LOOK_EVERY_S = 1.0
_MEETING_TAKES_S = 10.0
"""How long torch's rendezvous may take to return where the first node knows it is over."""
_CONNECT_S = 5.0


class EndpointKey:
    """The key in torch's store, as one node sees it.

    Args:
        store: A part of torch's store that is this launch's own.
        nnodes: How many nodes there may be.
    """

    def __init__(self, store: Store, *, nnodes: int) -> None:
        self._store, self._nnodes = store, nnodes
        self._stale = b""

    def read(self) -> Negotiated | None:
        """Return where to go if the others have met already, and somebody listens there.

        Raises:
            RendezvousError: If something else is written there, and stays.
        """
        text = self._read()
        if not text or text == self._stale:
            return None
        try:
            info = read_info(text, _KEY)
        except RendezvousError:
            time.sleep(2 * _LOOK_EVERY_S)  # the first node writes it again
            info = read_info(self._read(), _KEY)
        try:
            with socket.create_connection((info.address, info.port), timeout=_CONNECT_S):
                return late_at(info, nnodes=self._nnodes)
        except OSError:  # of an earlier launch, on a store that outlived it
            self._stale = text
            return None

    def put_up(self, info: NodeInfo, changed: Callable[[str], None]) -> Negotiated | None:
        """As the first node, say where to come; return where to go if another was faster.

        ``changed`` is called with the key each time that somebody else has written there since.
        """
        mine = info.to_text().encode()
        found = self._store.compare_set(_KEY, self._stale.decode(), mine.decode())
        if found != mine:
            return late_at(read_info(found, _KEY), nnodes=self._nnodes)

        def keep() -> None:
            while True:
                time.sleep(_LOOK_EVERY_S)
                if self._read() != mine:
                    changed(_KEY)
                    self._store.set(_KEY, mine.decode())

        threading.Thread(target=keep, daemon=True).start()
        return None

    def compare(self, coordinator: NodeInfo) -> Negotiated | None:
        """Return where to go if the first node of these is not the first of the launch."""
        while (text := self._read()) in (b"", self._stale):
            time.sleep(0.05)
        info = read_info(text, _KEY)
        return None if info == coordinator else late_at(info, nnodes=self._nnodes)

    def watch(self, done: threading.Event, go: Callable[[Negotiated], None]) -> None:
        """While torch's rendezvous waits: call ``go`` if it is over, and was without this node."""
        seen_s = None
        while not done.wait(_LOOK_EVERY_S):
            with contextlib.suppress(Exception):
                if seen_s is None and self._read() not in (b"", self._stale):
                    seen_s = time.monotonic()
                if seen_s is not None and time.monotonic() > seen_s + _MEETING_TAKES_S:
                    if (late := self.read()) is not None:
                        go(late)
                        return
                    seen_s = None

    def _read(self) -> bytes:
        return self._store.get(_KEY) if self._store.check([_KEY]) else b""


def late_at(info: NodeInfo, *, nnodes: int) -> Negotiated:
    """Return where to go, as the first node's card says it."""
    return Negotiated(
        node_rank=nnodes - 1,
        nnodes=nnodes,
        coordinator_host=info.host,
        coordinator_address=info.address,
        coordinator_port=info.port,
        secret=info.secret,
        at_ns=time.monotonic_ns(),
        is_late=True,
    )
