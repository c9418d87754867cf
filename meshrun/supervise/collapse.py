"""Lines that several ranks print alike become one, with the ranks that printed it. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

WINDOW_NS = 200_000_000
"""How long a line waits for the other ranks to print it too."""
_MOST_BYTES = 4 * 1024 * 1024
_BYTES_AN_ENTRY = 400
"""What a line that waits takes besides its text."""
_STEP = 1 << 256
"""Between the places of neighbours at first; each line put between two halves what is left."""


@dataclass(frozen=True, slots=True)
class Group:
    """A line and the ranks that printed it, in order."""

    line: bytes
    ranks: tuple[int, ...]


class _Entry:
    """A line that waits, its place in the order, and who has printed it."""

    __slots__ = ("after", "before", "line", "place", "ranks", "since_ns")

    def __init__(self, line: bytes, since_ns: int) -> None:
        self.line = line
        self.since_ns = since_ns
        self.place = 0
        self.ranks: set[int] = set()
        self.before: _Entry | None = None
        self.after: _Entry | None = None


_place = attrgetter("place")


class Collapser:
    """Holds lines back for a moment, and never changes the order of any one rank's lines.

    A line joins the next like line that comes after all that its rank has printed. One without
    a like goes right behind its rank's last line, so that what follows can still be shared.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """``ranks`` are those that print; a line that all have printed waits no longer."""
        self._printing = set(ranks)
        self._first: _Entry | None = None
        self._last: _Entry | None = None
        self._alike: dict[bytes, list[_Entry]] = {}
        """Entries of each text, in their order."""
        self._reached: dict[int, _Entry] = {}
        """The last entry that each rank has joined, while it waits."""
        self._since: deque[_Entry] = deque()
        """Entries by age; those that were shown are dropped when they come to the front."""
        self._bytes = 0

    def add(self, rank: int, line: bytes, now_ns: int) -> list[Group]:
        """Take a line of a rank; return what is now to be shown."""
        shown = self.due(now_ns)
        reached = self._reached.get(rank)
        entry = self._find_like(line, reached) or self._insert(_Entry(line, now_ns), reached)
        entry.ranks.add(rank)
        self._reached[rank] = entry
        if self._printing <= entry.ranks:
            shown += self._take_through(entry)
        while self._bytes > _MOST_BYTES and self._first is not None:
            shown += self._take_through(self._first)
        return shown

    def due(self, now_ns: int) -> list[Group]:
        """Return the lines that have waited long enough, and those before them."""
        shown: list[Group] = []
        while (due_ns := self.next_due_ns) is not None and due_ns <= now_ns:
            shown += self._take_through(self._since[0])
        return shown

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`due` has something to return, or ``None``."""
        while self._since and not self._since[0].ranks:
            self._since.popleft()
        return self._since[0].since_ns + WINDOW_NS if self._since else None

    def leave(self, rank: int) -> list[Group]:
        """A rank will print no more, and is not waited for; return what waited for it alone."""
        self._printing.discard(rank)
        last, entry = None, self._first
        while entry is not None:
            if self._printing <= entry.ranks:
                last = entry
            entry = entry.after
        return self._take_through(last) if last is not None else []

    def flush(self) -> list[Group]:
        """Return all that waits."""
        return self._take_through(self._last) if self._last is not None else []

    def _find_like(self, line: bytes, reached: _Entry | None) -> _Entry | None:
        alike = self._alike.get(line)
        if alike is None:
            return None
        index = 0 if reached is None else bisect_right(alike, reached.place, key=_place)
        return alike[index] if index < len(alike) else None

    def _insert(self, entry: _Entry, reached: _Entry | None) -> _Entry:
        entry.before = reached
        entry.after = self._first if reached is None else reached.after
        if entry.before is None:
            self._first = entry
        else:
            entry.before.after = entry
        if entry.after is None:
            self._last = entry
        else:
            entry.after.before = entry
        self._choose_place(entry)
        insort(self._alike.setdefault(entry.line, []), entry, key=_place)
        self._since.append(entry)
        self._bytes += len(entry.line) + _BYTES_AN_ENTRY
        return entry

    def _choose_place(self, entry: _Entry) -> None:
        """Give an entry a number between those of its neighbours."""
        if entry.after is None:
            entry.place = entry.before.place + _STEP if entry.before is not None else 0
        elif entry.before is None:
            entry.place = entry.after.place - _STEP
        else:
            entry.place = (entry.before.place + entry.after.place) // 2
            if entry.place == entry.before.place:  # halved too often
                place, each = 0, self._first
                while each is not None:
                    each.place, place, each = place, place + _STEP, each.after

    def _take_through(self, last: _Entry) -> list[Group]:
        taken = []
        entry: _Entry | None = None
        while entry is not last and self._first is not None:
            entry = self._first
            self._first = entry.after
            alike = self._alike[entry.line]
            alike.pop(0)
            if not alike:
                del self._alike[entry.line]
            self._bytes -= len(entry.line) + _BYTES_AN_ENTRY
            taken.append(Group(entry.line, tuple(sorted(entry.ranks))))
            for rank in entry.ranks:
                if self._reached.get(rank) is entry:
                    del self._reached[rank]
            entry.ranks.clear()
        if self._first is None:
            self._last = None
        else:
            self._first.before = None
        return taken
