"""One time of day for torch's rendezvous, which compares those of all nodes: the store host's.

A node whose clock is a minute behind would be taken for dead otherwise, and nobody would meet.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING

from meshrun.rendezvous.node_info import foreign

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "clock"
_EVERY_S = 1.0
_WITHIN_S = 5.0
_MOST_S = 10 * 365 * 24 * 3600.0
"""By which clocks differ, even where one has lost its battery."""


def share_clock(store: Store, done: threading.Event, changed: Callable[[str], None]) -> None:
    """As the store's host: write what time it is there, again and again, until all have met.

    Args:
        store: A part of torch's store.
        done: Set once all have met.
        changed: Called with the key if somebody else has written there.
    """

    def write(written: bytes) -> None:
        while not done.wait(_EVERY_S):
            if not store.check([_KEY]) or store.get(_KEY) != written:
                changed(_KEY)
            written = put()

    def put() -> bytes:
        now = repr(time.time())
        store.set(_KEY, now)
        return now.encode()

    threading.Thread(target=write, args=(put(),), daemon=True).start()


def follow_clock(store: Store) -> None:
    """As any other node: have torch's rendezvous in this process go by the host's clock.

    Raises:
        RendezvousError: If something else is written where the time belongs.
    """
    try:
        store.wait([_KEY], timedelta(seconds=_WITHIN_S))
    except Exception:
        return  # the store is not served by a launcher
    ahead_s = _read_ahead(store)
    if ahead_s is None:
        time.sleep(2 * _EVERY_S)  # its host writes the time again
        ahead_s = _read_ahead(store)
    if ahead_s is None:
        raise foreign(store.get(_KEY), _KEY, "the time")
    _go_by(timedelta(seconds=ahead_s))


def _read_ahead(store: Store) -> float | None:
    with contextlib.suppress(ValueError):
        ahead_s = float(store.get(_KEY)) - time.time()
        return ahead_s if abs(ahead_s) < _MOST_S else None
    return None


def _go_by(ahead: timedelta) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    class HostsClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    dynamic_rendezvous.datetime = HostsClock
