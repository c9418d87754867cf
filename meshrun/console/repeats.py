"""Prints lines that several ranks write to stderr before they all fail only once. Pure."""

from __future__ import annotations

WAIT_NS = 3_000_000_000
"""How long a rank's words wait for its end; if it prints something else, no longer."""
AHEAD_NS = 500_000_000
"""How long words wait for another rank that has said only the first of them so far."""
_TOGETHER_NS = 50_000_000
"""Words that are farther apart are not one message."""
_MOST_LINES = 64
_TAIL_BYTES = 4096


class Repeats:
    """Holds lines that another rank has just printed, until the rank ends or prints another.

    Where it ends badly, as every rank does whose command line is wrong, nothing of it is printed:
    it stands there already.
    """

    def __init__(self) -> None:
        self._said: dict[int, bytes] = {}
        """What was printed last of each rank."""
        self._lines: dict[bytes, int] = {}
        """The last lines that were printed, and who said each first."""
        self._held: dict[int, bytes] = {}
        self._since_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}
        self._failed: dict[int, bool] = {}
        """Ranks that have ended, and whether they did badly."""

    def take(self, rank: int, text: bytes, now_ns: int) -> bytes:
        """Take what a rank says on stderr; return what is now to be printed of it."""
        printed = b""
        if now_ns - self._last_ns.get(rank, now_ns) > _TOGETHER_NS:
            printed = self.go_on(rank)
        text = self._held.pop(rank, b"") + text
        if not self._said_of(rank, text):
            return printed + self._let_go(rank, text)
        self._held[rank] = text
        self._last_ns[rank] = now_ns
        self._since_ns.setdefault(rank, now_ns)
        self._due_ns[rank] = self._due_of(rank, now_ns)
        return printed + (
            self.end(rank, failed=self._failed[rank]) if rank in self._failed else b""
        )

    def go_on(self, rank: int) -> bytes:
        """A rank prints something else; return what waits to be printed before it."""
        return self._let_go(rank, self._held.pop(rank, b""))

    def end(self, rank: int, *, failed: bool) -> bytes:
        """A rank has ended; return what is still to be printed of it."""
        self._failed[rank] = failed
        text = self._held.pop(rank, b"")
        while failed and (said := self._said_of(rank, text)):
            text = text[said:]
        return self._let_go(rank, text)

    def due(self, now_ns: int) -> dict[int, bytes]:
        """Return what has waited long enough, by rank."""
        late = [rank for rank, due_ns in self._due_ns.items() if due_ns <= now_ns]
        for rank in late:
            self._due_ns[rank] = self._due_of(rank, self._last_ns[rank])
        return {rank: self.go_on(rank) for rank in late if self._due_ns[rank] <= now_ns}

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`due` has something to return, or ``None``."""
        return min(self._due_ns.values(), default=None)

    def _due_of(self, rank: int, now_ns: int) -> int:
        """Until when a rank's words wait that have come by now."""
        text, end_ns = self._held[rank], self._since_ns[rank] + WAIT_NS
        is_ahead = self._said_of(rank, text) < len(text)
        return min(end_ns, now_ns + AHEAD_NS) if is_ahead else end_ns

    def _said_of(self, rank: int, text: bytes) -> int:
        """How many bytes of these whole lines another rank has said.

        All, if they stand among its last lines; or those at the beginning with which its own end,
        as it may be about to say the others.
        """
        other = self._lines.get(text.partition(b"\n")[0], rank)
        if other == rank or not text.endswith(b"\n") or b"\r" in text:
            return 0
        said = b"\n" + self._said[other]
        if b"\n" + text in said:
            return len(text)
        size = min(len(text), _TAIL_BYTES + 1)
        while size := text.rfind(b"\n", 0, size - 1) + 1:
            if said.endswith(b"\n" + text[:size]):
                break
        return size

    def _let_go(self, rank: int, text: bytes) -> bytes:
        self._since_ns.pop(rank, None)
        self._due_ns.pop(rank, None)
        self._last_ns.pop(rank, None)
        if text:
            self._said[rank] = (self._said.get(rank, b"") + text[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            for line in text[-_TAIL_BYTES:].split(b"\n")[-_MOST_LINES:]:
                if line:
                    self._lines.setdefault(line, rank)
            while len(self._lines) > _MOST_LINES:
                del self._lines[next(iter(self._lines))]
        return text
