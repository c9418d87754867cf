"""One time of day for torch's rendezvous, which compares those of all nodes: the store host's.

A node whose clock is a minute behind would be taken for dead otherwise, and nobody would meet.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "clock"
_EVERY_S = 1.0
_WITHIN_S = 5.0


def share_clock(store: Store, done: threading.Event) -> None:
    """As the store's host: write what time it is there, again and again, until all have met."""

    def write() -> None:
        while not done.wait(_EVERY_S):
            store.set(_KEY, repr(time.time()))

    store.set(_KEY, repr(time.time()))
    threading.Thread(target=write, daemon=True).start()


def follow_clock(store: Store) -> None:
    """As any other node: have torch's rendezvous in this process go by the host's clock."""
    try:
        store.wait([_KEY], timedelta(seconds=_WITHIN_S))
    except Exception:
        return  # the store is not served by a launcher
    ahead_s = float(store.get(_KEY)) - time.time()
    _go_by(timedelta(seconds=ahead_s))


def _go_by(ahead: timedelta) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    class HostsClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    dynamic_rendezvous.datetime = HostsClock
