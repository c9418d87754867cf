"""Asks ranks for their calls, through a pipe to each; they answer through their reports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping

from meshrun.host.processes import is_stopped
from meshrun.host.reactor import Reactor
from meshrun.protocol.collectives import ALL_CALLS, RankCalled, RankRecords

_ANSWER_TAKES_S = 1.5
"""Time for a rank's thread to get the interpreter's lock and read the recorder, if all are busy."""


class CollectiveRequests:
    """The pipe to each rank, and the request that is under way.

    Args:
        reactor: The loop's.
        done: Called once all ranks that were asked have answered, or time has run out.
    """

    def __init__(self, reactor: Reactor, done: Callable[[], None]) -> None:
        self._pipes: dict[int, int] = {}
        self._recording: set[int] = set()
        """Ranks that have a recorder, and so answer."""
        self._asked: set[int] = set()
        self._done = done
        self._deadline = reactor.call_at(None, self._complete, skips=False)
        self.called: dict[int, RankCalled] = {}
        """The last answer of each rank."""

    def open(self, rank: int) -> int:
        """Return a new descriptor from which the rank reads requests, for the caller to close."""
        self._close(rank)
        theirs, self._pipes[rank] = os.pipe()
        os.set_blocking(self._pipes[rank], False)
        return theirs

    def begin(self) -> None:
        """Prepare for a new generation of ranks."""
        self._recording.clear()
        self.called = {}
        self._reset()

    def ask(self, pids: Mapping[int, int], *, soon: bool = False) -> None:
        """Ask ranks for their calls, except for stopped ranks, which cannot answer.

        The report of a rank whose call failed is kept: to the recorder, that call has ended.

        Args:
            pids: Process ids by rank.
            soon: Whether to wait for the answers only briefly.
        """
        if not self.is_under_way:
            self.called = {
                rank: answer for rank, answer in self.called.items() if answer.has_failed
            }
            able = {rank for rank in pids.keys() & self._recording if not is_stopped(pids[rank])}
            self._asked = {rank for rank in able if self._write(rank, ALL_CALLS)}
            if self._asked:
                self._deadline.restart(_ANSWER_TAKES_S / 5 if soon else _ANSWER_TAKES_S)

    def expect_only(self, alive: Collection[int]) -> None:
        """Do not wait for answers of ranks that have exited."""
        if self._asked and not self._asked <= set(alive):
            self._asked.intersection_update(alive)
            if not self._asked:
                self._complete()

    def send(self, request: bytes, ranks: Iterable[int]) -> None:
        """Send a request whose answers nobody waits for."""
        for rank in self._recording.intersection(ranks):
            self._write(rank, request)

    def receive(self, message: RankRecords | RankCalled) -> None:
        """Take a rank's message."""
        if isinstance(message, RankRecords):
            self._recording.add(message.rank)
            return
        known = self.called.get(message.rank)
        if known is None or not known.has_failed:
            self.called[message.rank] = message
        if message.rank in self._asked:
            self._asked.remove(message.rank)
            if not self._asked:
                self._complete()

    @property
    def is_under_way(self) -> bool:
        """Whether answers are awaited."""
        return self._deadline.at_ns is not None

    def close(self) -> None:
        """Close all pipes."""
        self._reset()
        for rank in list(self._pipes):
            self._close(rank)

    def _complete(self) -> None:
        self._reset()
        self._done()

    def _reset(self) -> None:
        self._asked = set()
        self._deadline.cancel()

    def _write(self, rank: int, request: bytes) -> bool:
        """Send a request; return whether it was written."""
        with contextlib.suppress(OSError):  # the rank has exited, or the pipe is full
            return os.write(self._pipes[rank], request) > 0
        return False

    def _close(self, rank: int) -> None:
        if rank in self._pipes:
            os.close(self._pipes.pop(rank))
