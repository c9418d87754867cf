"""The links of a launcher in the loop's selector, and the news they bring."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable

from meshrun.protocol.activity import Activity
from meshrun.protocol.events import FromNodes
from meshrun.rendezvous.connection import Link

_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class Switchboard:
    """What a head and a member share.

    Args:
        selector: The loop's; its keys hold what to call.
        note: Shows people one line.
    """

    def __init__(self, selector: selectors.BaseSelector, note: Callable[[str], None]) -> None:
        self.selector = selector
        self.note = note
        self.news: deque[FromNodes] = deque()
        self.activity = Activity()

    def add(self, link: Link, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called when something came, or there is room for what waits."""
        self.selector.register(link, selectors.EVENT_READ, on_ready)
        self.settle(link)

    def settle(self, link: Link) -> None:
        """After sending or receiving: wait for what the link now waits for."""
        if link.closed is not None:
            self.drop(link)
            return
        key = self.selector.get_key(link)
        wanted = _BOTH if link.wants_to_write else selectors.EVENT_READ
        if key.events != wanted:
            self.selector.modify(link, wanted, key.data)

    def close(self, link: Link, why: str) -> None:
        """Stop watching a link and close it."""
        self.drop(link)
        link.close(why)

    def skip(self, lost_ns: int) -> None:
        """Do not count this time as the others' silence: nobody could listen here."""
        now_ns = time.monotonic_ns()
        for key in self.selector.get_map().values():
            if isinstance(key.fileobj, Link):
                key.fileobj.heard_ns = min(now_ns, key.fileobj.heard_ns + lost_ns)

    def drop(self, link: Link) -> None:
        """Stop watching a link, closed or not."""
        try:
            self.selector.unregister(link)
        except (KeyError, ValueError):
            # The selector looks a closed one up by its object.
            pass
