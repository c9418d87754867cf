"""Where the first node of an elastic launch lets in those that come later, told in torch's store.

torch's rendezvous is over by then, and its next round would not do: a node that comes later reads
this and goes to the first node's launcher.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshrun.events import Negotiated

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "door"
_LOOK_EVERY_S = 1.0
_MEETING_TAKES_S = 10.0
"""How long torch's rendezvous may take to return where the first node knows it is over."""
_CONNECT_S = 5.0


class DoorSign:
    """The key in torch's store, as one node sees it.

    Args:
        store: A part of torch's store that is this launch's own.
        nnodes: How many nodes there may be.
    """

    def __init__(self, store: Store, *, nnodes: int) -> None:
        self._store, self._nnodes = store, nnodes
        self._stale = ""

    def read(self) -> Negotiated | None:
        """Return where to go if the others have met already, and somebody listens there."""
        text = self._read()
        if not text or text == self._stale:
            return None
        card = json.loads(text)
        try:
            with socket.create_connection((card["address"], card["port"]), timeout=_CONNECT_S):
                return self._late(card)
        except OSError:  # of an earlier launch, on a store that outlived it
            self._stale = text
            return None

    def put_up(self, card: dict[str, Any]) -> Negotiated | None:
        """As the first node, say where to come; return where to go if another was faster."""
        mine = json.dumps(card)
        found = self._store.compare_set(_KEY, self._stale, mine).decode()
        return None if found == mine else self._late(json.loads(found))

    def compare(self, head: dict[str, Any]) -> Negotiated | None:
        """Return where to go if the first node of these is not the first of the launch."""
        while (text := self._read()) in ("", self._stale):
            time.sleep(0.05)
        return None if text == json.dumps(head) else self._late(json.loads(text))

    def watch(self, done: threading.Event, go: Callable[[Negotiated], None]) -> None:
        """While torch's rendezvous waits: call ``go`` if it is over, and was without this node."""
        seen_s = None
        while not done.wait(_LOOK_EVERY_S):
            with contextlib.suppress(Exception):
                if seen_s is None and self._read() not in ("", self._stale):
                    seen_s = time.monotonic()
                if seen_s is not None and time.monotonic() > seen_s + _MEETING_TAKES_S:
                    if (late := self.read()) is not None:
                        go(late)
                        return
                    seen_s = None

    def _read(self) -> str:
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""

    def _late(self, card: dict[str, Any]) -> Negotiated:
        return Negotiated(
            node_rank=self._nnodes - 1,
            nnodes=self._nnodes,
            head_host=str(card["host"]),
            head_address=str(card["address"]),
            head_port=int(card["port"]),
            secret=str(card["secret"]),
            at_ns=time.monotonic_ns(),
            is_late=True,
        )
