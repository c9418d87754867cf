"""Requests to the ranks' answering threads for their collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from meshrun.host.process_state import is_stopped
from meshrun.host.reactor import Reactor
from meshrun.protocol.collectives import ALL_CALLS, STACKS, RankCalled, RankListens

_ANSWER_TAKES_S = 1.5
"""Time for a rank's thread to get the interpreter's lock and read the recorder, if all are busy."""


class RankPipes:
    """The pipes, and which ranks read them."""

    def __init__(self) -> None:
        self._pipes: dict[int, int] = {}
        self._listening: set[int] = set()
        self._recording: set[int] = set()

    def open(self, rank: int) -> int:
        """Return a new descriptor from which the rank reads requests, for the caller to close."""
        self._close(rank)
        theirs, self._pipes[rank] = os.pipe()
        os.set_blocking(self._pipes[rank], False)
        return theirs

    def begin(self) -> None:
        """Prepare for a new generation of ranks."""
        self._listening.clear()
        self._recording.clear()

    def receive(self, message: RankListens) -> None:
        """Take a rank's message that it reads its pipe."""
        self._listening.add(message.rank)
        if message.records:
            self._recording.add(message.rank)

    def ask(self, request: bytes, pids: Mapping[int, int]) -> set[int]:
        """Send a request to all ranks that can answer it; return these.

        A stopped rank cannot answer.

        Args:
            request: One of those in :mod:`meshrun.protocol.collectives`.
            pids: Process ids by rank.
        """
        able = self._able(request).intersection(pids)
        return {r for r in able if not is_stopped(pids[r]) and self._write(r, request)}

    def send(self, request: bytes, ranks: Iterable[int]) -> None:
        """Send a request whose answers nobody waits for."""
        for rank in self._able(request).intersection(ranks):
            self._write(rank, request)

    def close(self) -> None:
        """Close all pipes."""
        for rank in list(self._pipes):
            self._close(rank)

    def _able(self, request: bytes) -> set[int]:
        return self._listening if request == STACKS else self._recording

    def _write(self, rank: int, request: bytes) -> bool:
        """Send a request; return whether it was written."""
        with suppress(OSError):  # the rank has exited, or the pipe is full
            return os.write(self._pipes[rank], request) > 0
        return False

    def _close(self, rank: int) -> None:
        if rank in self._pipes:
            os.close(self._pipes.pop(rank))


class CollectiveRequests:
    """The request that is under way, and the last answers.

    ``done`` is called once all ranks that were asked have answered, or time has run out.
    """

    def __init__(self, reactor: Reactor, pipes: RankPipes, done: Callable[[], None]) -> None:
        self._pipes = pipes
        self._asked: set[int] = set()
        self._done = done
        self._deadline = reactor.call_at(None, lambda: self._expect(set()), skips=False)
        self.called: dict[int, RankCalled] = {}
        """The last answer of each rank."""

    def begin(self) -> None:
        """Prepare for a new generation of ranks."""
        self.called, self._asked = {}, set()
        self._deadline.cancel()

    def ask(self, pids: Mapping[int, int], *, soon: bool = False) -> None:
        """Ask ranks for their calls, except for stopped ranks, which cannot answer.

        The report of a rank whose call failed is kept: to the recorder, that call has ended. With
        ``soon``, the answers are awaited only briefly.
        """
        if not self.is_under_way:
            self.called = {
                rank: answer for rank, answer in self.called.items() if answer.has_failed
            }
            self._asked = self._pipes.ask(ALL_CALLS, pids)
            if self._asked:
                self._deadline.restart(_ANSWER_TAKES_S / 5 if soon else _ANSWER_TAKES_S)

    def expect_only(self, alive: Collection[int]) -> None:
        """Do not wait for answers of ranks that have exited."""
        self._expect(self._asked.intersection(alive))

    def receive(self, message: RankCalled) -> None:
        """Take a rank's answer, or its report of a failed call."""
        called = self.called.get(message.rank)
        if called is None or not called.has_failed:
            self.called[message.rank] = message
        self._expect(self._asked - {message.rank})

    @property
    def is_under_way(self) -> bool:
        """Whether answers are awaited."""
        return self._deadline.is_pending

    def _expect(self, ranks: set[int]) -> None:
        """Wait only for these ranks; once there is none left, continue."""
        is_complete = bool(self._asked) and not ranks
        self._asked = ranks
        if is_complete:
            self._deadline.cancel()
            self._done()
