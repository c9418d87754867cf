"""``--collapse``: merges equal lines of several ranks into one, labeled with the ranks."""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from msgspec import Struct

from meshrun.console.console import Console
from meshrun.console.lines import LineAssembler, Piece
from meshrun.layout.labels import merged_label
from meshrun.plan.plan import LaunchPlan

WINDOW_NS = 200_000_000
"""How long a line waits for the other ranks to print it too."""
COMING_NS = 1_000_000_000
"""How long a line waits for a rank that is behind, after that rank began or caught up a little."""
LONGEST_NS = 5_000_000_000
"""How long a line waits for such ranks in total."""
_MOST_BYTES = 16 * 1024 * 1024
_AHEAD_BYTES = 1024 * 1024
"""A rank with more than this waiting is not read while other ranks catch up."""
_MOST_MOVED = 64
"""At most so many lines that only one rank has printed are moved, so that the next is shared."""
_BYTES_PER_ENTRY = 400
"""The memory that a waiting line takes, besides its text."""
_STEP = 1 << 256
"""The initial distance between neighbors' places; each insertion between them halves it."""


class Group(Struct, frozen=True):
    """A line and the ranks that printed it, in order."""

    line: bytes
    ranks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    """A waiting line, its place in the order, and the ranks that have printed it."""

    line: bytes
    since_ns: int
    first: int
    """The rank that printed it first."""
    prior: _Entry | None
    """The line that this rank had printed before."""
    place: int = 0
    ranks: int = 0
    """One bit per rank; 0 once it was shown."""
    before: _Entry = field(init=False)
    after: _Entry = field(init=False)


_place = attrgetter("place")


class LineMerger:
    """Holds lines back for a moment, without changing the order of any rank's own lines.

    A new line joins the next equal line after everything that its rank has printed. If there is
    none, it goes right behind its rank's last line, so that the lines after it can still be shared.
    For the same reason, lines that only this rank has printed move back if they are in the way.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Take the ranks that print; a line is shown as soon as all of them have printed it."""
        self._printing = sum(1 << rank for rank in set(ranks))
        self._ends = _Entry(b"\n", 0, -1, None)
        """What is before the first entry and after the last one; no line is equal to it."""
        self._ends.before = self._ends.after = self._ends
        self._equal: dict[bytes, deque[_Entry]] = {}
        """Entries by text, in order."""
        self._reached: dict[int, _Entry] = {}
        """The last entry that each rank has joined, which may have been shown already."""
        self._since: deque[_Entry] = deque()
        """Entries by age; those already shown are dropped when they reach the front."""
        self._began_ns = -LONGEST_NS
        """When a rank last began."""
        self._followed_ns: dict[int, int] = {}
        """When another rank last joined an older line that each rank was the first to print."""
        self._bytes = 0
        self._own_bytes: dict[int, int] = {}
        """The part of ``_bytes`` that each rank was the first to print."""

    def add(self, rank: int, lines: Iterable[bytes], now_ns: int) -> list[Group]:
        """Add lines of a rank; return the lines to show now."""
        shown = self.due(now_ns)
        bit = 1 << rank
        reached = self._reached.get(rank)
        for line in lines:
            if reached is not None and not reached.ranks:
                reached = None
            following = (reached or self._ends).after
            is_equal = following.line == line  # usually: ranks print in the same order
            entry = following if is_equal else self._find_equal(line, bit, reached)
            if entry is None:
                entry = self._insert(_Entry(line, now_ns, rank, reached))
            elif now_ns - entry.since_ns > WINDOW_NS // 2:
                self._followed_ns[entry.first] = now_ns
            entry.ranks |= bit
            self._reached[rank] = reached = entry
            if not self._printing & ~entry.ranks:
                shown += self._take_through(entry)
            while self._bytes > _MOST_BYTES:
                shown += self._take_through(self._ends.after)
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
        if not self._since:
            return None
        since_ns = self._since[0].since_ns
        coming_ns = min(self._coming_until_ns(self._since[0].first), since_ns + LONGEST_NS)
        return max(since_ns + WINDOW_NS, coming_ns)

    def begin(self, now_ns: int) -> None:
        """Note that a rank begins to print, so that lines of the others wait for it."""
        self._began_ns = now_ns

    def is_ahead(self, rank: int, now_ns: int) -> bool:
        """Return whether a rank must wait for others that are catching up."""
        is_far = self._own_bytes.get(rank, 0) > _AHEAD_BYTES
        return is_far and now_ns < self._coming_until_ns(rank)

    def _coming_until_ns(self, rank: int) -> int:
        """Return until when other ranks are expected to print what this rank has."""
        return max(self._began_ns, self._followed_ns.get(rank, self._began_ns)) + COMING_NS

    def leave(self, rank: int) -> list[Group]:
        """Stop waiting for a rank that prints no more; return the lines that waited only for it."""
        self._printing &= ~(1 << rank)
        last = entry = self._ends
        while (entry := entry.after) is not self._ends:
            if not self._printing & ~entry.ranks:
                last = entry
        return self._take_through(last)

    def flush(self) -> list[Group]:
        """Return all waiting lines."""
        return self._take_through(self._ends.before)

    def _find_equal(self, line: bytes, bit: int, reached: _Entry | None) -> _Entry | None:
        """Return the entry that a rank's next line joins; move the rank's own ones if needed."""
        equal = self._equal.get(line)
        if equal is None:
            return None
        index = 0 if reached is None else bisect_right(equal, reached.place, key=_place)
        if index < len(equal):
            return equal[index]
        own: list[_Entry] = []
        while reached is not None and reached.ranks == bit and len(own) < _MOST_MOVED:
            own.append(reached)
            reached = reached.prior
        if reached is not None and reached.ranks:
            index = bisect_right(equal, reached.place, key=_place)
        else:
            index = 0
        found = next((equal[i] for i in range(index, len(equal)) if not equal[i].ranks & bit), None)
        if found is not None:
            for entry in reversed(own):
                if entry.place > found.place:
                    self._unlink(entry)
                    self._link(entry, found)
        return found

    def _insert(self, entry: _Entry) -> _Entry:
        self._link(entry, (entry.prior or self._ends).after)
        self._since.append(entry)
        size = len(entry.line) + _BYTES_PER_ENTRY
        self._bytes += size
        self._own_bytes[entry.first] = self._own_bytes.get(entry.first, 0) + size
        return entry

    def _unlink(self, entry: _Entry) -> None:
        self._equal[entry.line].remove(entry)
        entry.before.after, entry.after.before = entry.after, entry.before

    def _link(self, entry: _Entry, after: _Entry) -> None:
        """Put an entry right before another one, or at the end before ``_ends``."""
        entry.before, entry.after = after.before, after
        entry.before.after = after.before = entry
        self._choose_place(entry)
        equal = self._equal.setdefault(entry.line, deque())
        if after is self._ends:
            equal.append(entry)
        else:
            insort(equal, entry, key=_place)

    def _choose_place(self, entry: _Entry) -> None:
        """Give an entry a place between those of its neighbors."""
        before, after = entry.before, entry.after
        if after is self._ends:
            entry.place = before.place + _STEP
        elif before is self._ends:
            entry.place = after.place - _STEP
        else:
            entry.place = (before.place + after.place) // 2
            if entry.place == before.place:  # no room is left: renumber all
                place, each = 0, self._ends.after
                while each is not self._ends:
                    each.place, place, each = place, place + _STEP, each.after

    def _take_through(self, last: _Entry) -> list[Group]:
        """Return the lines up to an entry, and forget them; none for ``_ends``."""
        taken = []
        entry = self._ends
        while entry is not last:
            entry = self._ends.after
            self._unlink(entry)
            if not self._equal[entry.line]:
                del self._equal[entry.line]
            size = len(entry.line) + _BYTES_PER_ENTRY
            self._bytes -= size
            self._own_bytes[entry.first] -= size
            taken.append(Group(entry.line, _ranks_of(entry.ranks)))
            # It may remain in `_reached`, where it must not keep others in memory.
            entry.ranks, entry.before, entry.after, entry.prior = 0, self._ends, self._ends, None
        return taken


@lru_cache(maxsize=256)
def _ranks_of(bits: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)


class Collapsing:
    """Merges lines before the console prints them; drops the states of progress bars."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        layout, self._console = plan.layout, console
        is_named = plan.request.console.prefix == "mesh"

        @lru_cache(maxsize=256)
        def name_ranks(ranks: tuple[int, ...]) -> bytes:
            return f"[{merged_label(layout, ranks)}] ".encode() if is_named else b""

        self._name_ranks = name_ranks
        here = frozenset(layout.ranks_of_node(plan.node_rank))
        self._ranks = here if plan.shown is None else here & plan.shown
        self._mergers: dict[bool, LineMerger] = {}
        self._lines: dict[tuple[int, bool], LineAssembler] = {}
        self.begin_generation()

    def begin_generation(self) -> None:
        """Print what waits, and expect output from all ranks again."""
        self.flush()
        self._mergers = {False: LineMerger(self._ranks), True: LineMerger(self._ranks)}

    def feed(self, rank: int, to_stderr: bool, data: bytes) -> None:
        """Take the next bytes of a rank's stream; ``b""`` is its end."""
        lines = self._lines.setdefault((rank, to_stderr), LineAssembler())
        self._add(rank, to_stderr, lines.feed(data) if data else lines.finish())
        if not data:
            self._show(self._mergers[to_stderr].leave(rank), to_stderr)

    def _add(self, rank: int, to_stderr: bool, pieces: list[Piece]) -> None:
        now_ns = time.monotonic_ns()
        for piece in pieces:
            if not piece.is_state:
                printed = piece.text.removesuffix(b"\n").split(b"\n")
                self._show(self._mergers[to_stderr].add(rank, printed, now_ns), to_stderr)

    def end_lines(self) -> None:
        """Print everything, including lines that have not ended."""
        for (rank, to_stderr), lines in self._lines.items():
            self._add(rank, to_stderr, lines.finish())
        self.flush()

    def begin(self) -> None:
        """Note that a rank begins."""
        for merger in self._mergers.values():
            merger.begin(time.monotonic_ns())

    def is_ahead(self, rank: int, to_stderr: bool) -> bool:
        """Return whether a rank must not be read while others catch up."""
        return self._mergers[to_stderr].is_ahead(rank, time.monotonic_ns())

    @property
    def next_due_ns(self) -> int | None:
        """When :meth:`show_due` has something to do, or ``None``."""
        times = [merger.next_due_ns for merger in self._mergers.values()]
        return min((at for at in times if at is not None), default=None)

    def show_due(self) -> None:
        """Print the lines that have waited long enough."""
        now_ns = time.monotonic_ns()
        for to_stderr, merger in self._mergers.items():
            self._show(merger.due(now_ns), to_stderr)

    def flush(self) -> None:
        """Print all waiting lines."""
        for to_stderr, merger in self._mergers.items():
            self._show(merger.flush(), to_stderr)

    def _show(self, groups: list[Group], to_stderr: bool) -> None:
        if groups:
            lines = [self._name_ranks(group.ranks) + group.line for group in groups]
            self._console.print_line(b"\n".join(lines), to_stderr=to_stderr)
