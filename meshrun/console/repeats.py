"""Prints lines that several ranks write to stderr before they all fail only once. Pure."""

from __future__ import annotations

WAIT_NS = 3_000_000_000
"""How long a rank's words wait for its end; if it prints something else, no longer."""
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
        self._last_ns: dict[int, int] = {}
        self._failed: dict[int, bool] = {}
        """Ranks that have ended, and whether they did badly."""

    def take(self, rank: int, text: bytes, now_ns: int) -> bytes:
        """Take what a rank says on stderr; return what is now to be printed of it."""
        printed = b""
        if now_ns - self._last_ns.get(rank, now_ns) > _TOGETHER_NS:
            printed = self.go_on(rank)
        text = self._held.pop(rank, b"") + text
        if not self._was_said(rank, text):
            return printed + self._let_go(rank, text)
        self._held[rank] = text
        self._last_ns[rank] = now_ns
        self._since_ns.setdefault(rank, now_ns)
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
        return self._let_go(rank, b"" if failed and self._was_said(rank, text) else text)

    def due(self, now_ns: int) -> dict[int, bytes]:
        """Return what has waited long enough, by rank."""
        late = [rank for rank, since in self._since_ns.items() if since + WAIT_NS <= now_ns]
        return {rank: self.go_on(rank) for rank in late}

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`due` has something to return, or ``None``."""
        return min(self._since_ns.values()) + WAIT_NS if self._since_ns else None

    def _was_said(self, rank: int, text: bytes) -> bool:
        """Whether these whole lines stand among another rank's last."""
        other = self._lines.get(text.partition(b"\n")[0], rank)
        return (
            other != rank
            and text.endswith(b"\n")
            and b"\r" not in text
            and b"\n" + text in b"\n" + self._said[other]
        )

    def _let_go(self, rank: int, text: bytes) -> bytes:
        self._since_ns.pop(rank, None)
        self._last_ns.pop(rank, None)
        if text:
            self._said[rank] = (self._said.get(rank, b"") + text[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            for line in text[-_TAIL_BYTES:].split(b"\n")[-_MOST_LINES:]:
                if line:
                    self._lines.setdefault(line, rank)
            while len(self._lines) > _MOST_LINES:
                del self._lines[next(iter(self._lines))]
        return text
