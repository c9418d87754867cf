"""``--collapse``: merges equal lines of ranks on their way to the console."""

from __future__ import annotations

import time
from functools import lru_cache

from meshrun.console.console import Console
from meshrun.console.line_merger import Group, LineMerger
from meshrun.console.lines import LineAssembler, Piece
from meshrun.layout.labels import merged_label
from meshrun.plan.plan import LaunchPlan


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
