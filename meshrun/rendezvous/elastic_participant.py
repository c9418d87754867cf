"""A node of a launch whose nodes come and go: cut off from the head, it tries to come back."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from typing import Any

from meshrun.errors import RendezvousError
from meshrun.protocol.events import NodeLost
from meshrun.rendezvous.deadline import Patience
from meshrun.rendezvous.messages import Begin, Idle, Leave, Message, Waiting, Welcome
from meshrun.rendezvous.participant import Member


class ElasticMember(Member):
    """A node that is not the first; see :class:`Member`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_idle = False
        """Whether nothing is left here of the last generation of ranks."""
        self._is_spare = False
        self._lost = ""
        """Why the head was lost, while this node tries to come back."""
        super().__init__(*args, **kwargs)

    def tell(self, message: Message) -> None:
        """Pass on what this node's own launch says."""
        if isinstance(message, Idle):
            self._is_idle = True
            if self._lost:
                self._come_back()
        super().tell(message)
        if isinstance(message, Leave):
            self._over = True

    def _hear(self, message: Message) -> None:
        if isinstance(message, Waiting) and self._card.node_rank is None:
            self._is_spare, self._lost = True, ""
        if isinstance(message, Welcome | Begin):
            self._is_idle = self._is_spare = False
            self._lost = ""
        super()._hear(message)

    def _look_for_head(self) -> None:
        if self._lost and not (self._is_idle or self._is_spare):
            return  # its own ranks are to end first
        super()._look_for_head()

    def _drop(self, why: str, *, misled_s: float | None = None) -> None:
        link, now_ns = self._link, time.monotonic_ns()
        if link is None or self._over or self._failed or not (self._met or self._is_spare):
            super()._drop(why, misled_s=misled_s)
            return
        self._link = None
        self._board.close(link, why)
        self._lost = self._tried = why
        if self._met:
            self._met = False
            news = NodeLost(node_rank=0, host=self._head_host, why=why, at_ns=now_ns)
            self._board.news.append(news)
        if self._is_idle or self._is_spare:
            self._come_back()

    def _come_back(self) -> None:
        self._board.note(
            f"trying to come back to node 0 at {self._meeting.endpoint}"
            f" for {self._meeting.return_s:.0f} s"
        )
        self._card = replace(self._card, node_rank=None)
        self._patience = Patience(self._meeting.return_s)
        self._retry_ns = time.monotonic_ns()

    def _not_connected(self, why: str, *, misled_s: float | None = None) -> None:
        if self._lost and why == os.strerror(errno.ECONNREFUSED):
            who = f"node 0 ({self._head_host})" if self._head_host else "node 0"
            self._fail(
                RendezvousError(
                    f"{who} was lost: {self._lost}",
                    hint="nothing listens there any more, and without node 0 a launch cannot go"
                    " on; its own output may say why it ended",
                )
            )
            return
        super()._not_connected(why, misled_s=misled_s)
