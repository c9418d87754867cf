"""A node of an elastic launch: when it loses the coordinator, it tries to return."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from typing import Any

from meshrun.errors import RendezvousError
from meshrun.protocol.events import NodeLost
from meshrun.rendezvous.messages import Begin, Idle, Leave, Message, Waiting, Welcome
from meshrun.rendezvous.participant import Participant


class ElasticParticipant(Participant):
    """A node that is not the first; see :class:`Participant`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_idle = False
        """Whether nothing is left here of the last generation of ranks."""
        self._is_spare = False
        self._lost = ""
        """Why the coordinator was lost, while this node tries to come back."""
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
        if isinstance(message, Waiting) and message.has_begun and not self._met:
            self._is_spare, self._lost = True, ""
        if isinstance(message, Welcome | Begin):
            self._is_idle = self._is_spare = False
            self._lost = ""
        super()._hear(message)

    def _look_for_coordinator(self) -> None:
        if self._lost and not (self._is_idle or self._is_spare):
            return  # its own ranks are to end first
        super()._look_for_coordinator()

    def _drop(self, why: str, *, misled_s: float | None = None) -> None:
        connection, now_ns = self._connection, time.monotonic_ns()
        if connection is None or self._over or self._failed or not (self._met or self._is_spare):
            super()._drop(why, misled_s=misled_s)
            return
        self._connection = None
        self._board.close(connection, why)
        self._lost = self._tried = why
        if self._met:
            self._met = False
            news = NodeLost(node_rank=0, host=self._coordinator_host, why=why, at_ns=now_ns)
            self._board.news.append(news)
        if self._is_idle or self._is_spare:
            self._come_back()

    def _come_back(self) -> None:
        self._board.note(
            f"reconnecting to node 0 at {self._meeting.endpoint}, up to"
            f" {self._meeting.return_s:.0f} s"
        )
        self._info = replace(self._info, node_rank=None)
        self._deadline = self._board.deadline(self._meeting.return_s)
        self._retry_ns = time.monotonic_ns()

    def _not_connected(self, why: str, *, misled_s: float | None = None) -> None:
        if self._lost and why == os.strerror(errno.ECONNREFUSED):
            who = f"node 0 ({self._coordinator_host})" if self._coordinator_host else "node 0"
            self._fail(
                RendezvousError(
                    f"{who} was lost: {self._lost}",
                    hint="its launcher is gone, and a launch cannot continue without node 0; its"
                    " output may show why it exited",
                )
            )
            return
        super()._not_connected(why, misled_s=misled_s)
