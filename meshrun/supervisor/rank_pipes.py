"""A pipe to each rank, through which the launcher sends requests to the rank's answering thread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from meshrun.host.process_state import is_stopped
from meshrun.protocol.collectives import STACKS, RankListens


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
