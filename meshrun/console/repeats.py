"""Removes repetitions from what ranks write to stderr before they fail. Pure."""

from __future__ import annotations

WAIT_NS = 3_000_000_000
"""How long a rank's lines wait for it to end or to print something else."""
AHEAD_NS = 500_000_000
"""How long lines wait for another rank that has printed only the first of them so far."""
_TOGETHER_NS = 50_000_000
"""Lines that are farther apart in time do not form one message."""
_MOST_LINES = 64
_TAIL_BYTES = 4096


class Repeats:
    """Holds lines that another rank has just printed, until the rank ends or prints other lines.

    If the rank fails, as every rank does when the command line is wrong, its lines are dropped:
    they have been printed already.
    """

    def __init__(self) -> None:
        self._printed: dict[int, bytes] = {}
        """The end of what was printed for each rank."""
        self._first_rank: dict[bytes, int] = {}
        """The last lines that were printed, and the rank that wrote each first."""
        self._held: dict[int, bytes] = {}
        self._since_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}
        self._failed: dict[int, bool] = {}
        """Ranks that have ended, and whether they failed."""

    def take(self, rank: int, text: bytes, now_ns: int) -> bytes:
        """Take what a rank writes to stderr; return what to print now."""
        printed = b""
        if now_ns - self._last_ns.get(rank, now_ns) > _TOGETHER_NS:
            printed = self.release(rank)
        text = self._held.pop(rank, b"") + text
        if not self._repeated_bytes(rank, text):
            return printed + self._record(rank, text)
        self._held[rank] = text
        self._last_ns[rank] = now_ns
        self._since_ns.setdefault(rank, now_ns)
        self._due_ns[rank] = self._due_of(rank, now_ns)
        return printed + (
            self.end(rank, failed=self._failed[rank]) if rank in self._failed else b""
        )

    def release(self, rank: int) -> bytes:
        """Return the held lines of a rank, which must be printed now."""
        return self._record(rank, self._held.pop(rank, b""))

    def end(self, rank: int, *, failed: bool) -> bytes:
        """Note that a rank has ended; return which of its held lines to print."""
        self._failed[rank] = failed
        text = self._held.pop(rank, b"")
        while failed and (repeated := self._repeated_bytes(rank, text)):
            text = text[repeated:]
        return self._record(rank, text)

    def due(self, now_ns: int) -> dict[int, bytes]:
        """Return the lines that have waited long enough, by rank."""
        late = [rank for rank, due_ns in self._due_ns.items() if due_ns <= now_ns]
        for rank in late:
            self._due_ns[rank] = self._due_of(rank, self._last_ns[rank])
        return {rank: self.release(rank) for rank in late if self._due_ns[rank] <= now_ns}

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`due` has something to return, or ``None``."""
        return min(self._due_ns.values(), default=None)

    def _due_of(self, rank: int, now_ns: int) -> int:
        """Return until when a rank's held lines wait."""
        text, end_ns = self._held[rank], self._since_ns[rank] + WAIT_NS
        is_ahead = self._repeated_bytes(rank, text) < len(text)
        return min(end_ns, now_ns + AHEAD_NS) if is_ahead else end_ns

    def _repeated_bytes(self, rank: int, text: bytes) -> int:
        """Return how many bytes of these whole lines another rank has printed.

        These are all, if they are among that rank's last lines; otherwise those at the beginning
        that end the other's output, as it may be about to print the rest.
        """
        other = self._first_rank.get(text.partition(b"\n")[0], rank)
        if other == rank or not text.endswith(b"\n") or b"\r" in text:
            return 0
        printed = b"\n" + self._printed[other]
        if b"\n" + text in printed:
            return len(text)
        size = min(len(text), _TAIL_BYTES + 1)
        while size := text.rfind(b"\n", 0, size - 1) + 1:
            if printed.endswith(b"\n" + text[:size]):
                break
        return size

    def _record(self, rank: int, text: bytes) -> bytes:
        """Record that a rank's lines are printed now, and return them."""
        self._since_ns.pop(rank, None)
        self._due_ns.pop(rank, None)
        self._last_ns.pop(rank, None)
        if text:
            tail = text[-_TAIL_BYTES:]
            self._printed[rank] = (self._printed.get(rank, b"") + tail)[-_TAIL_BYTES:]
            for line in tail.split(b"\n")[-_MOST_LINES:]:
                if line:
                    self._first_rank.setdefault(line, rank)
            while len(self._first_rank) > _MOST_LINES:
                del self._first_rank[next(iter(self._first_rank))]
        return text
