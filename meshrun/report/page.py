"""The parts of a dry run's pages: a console, and tables of one style."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NoReturn

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Column, Table
from rich.text import Text

from meshrun.host.descriptors import is_terminal

_PADDING = 2
_GAP = _PADDING + 1
"""Between two columns; the box has a place for a line there."""
_FOLDED = 24


class Page(Console):
    """A console that leaves a reader who went away to the caller, instead of exiting with 1."""

    def __init__(self) -> None:
        # Whatever rich makes of a descriptor that only looks like a terminal.
        plain = None if is_terminal(1) else False
        super().__init__(highlight=False, soft_wrap=False, force_terminal=plain)

    def on_broken_pipe(self) -> NoReturn:
        """Raise what :func:`print` raises."""
        raise BrokenPipeError


class _Table(Table):
    """A table that continues below itself if the window is too narrow, its first column repeated.

    No header and no value is cut; a column that is too wide alone is folded.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield it whole, or its parts."""
        parts = list(self._parts(options.max_width))
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
            return
        for place, columns in enumerate(parts):
            part = _plain_table()
            for column in columns:
                part.add_column(column.header, justify=column.justify, overflow="fold")
            for cells in zip(*(column.cells for column in columns), strict=True):
                part.add_row(*cells)
            if place:
                yield Text()
            yield part
        if self.caption:
            yield Text(str(self.caption))

    def _parts(self, room: int) -> Iterator[list[Column]]:
        """Yield the columns that stand side by side, the first column before each."""
        first, *others = self.columns
        part, used = [first], _width(first)
        for column in others:
            width = _GAP + _width(column)
            if used + width > room and len(part) > 1:
                yield part
                part, used = [first], _width(first)
            part.append(column)
            used += width
        yield part


def new_table(
    headers: Iterable[str] = (), *, texts: Collection[str] = (), wrapped: Collection[str] = ()
) -> Table:
    """Return a table without borders, with a line below its headers.

    Args:
        headers: Of its columns.
        texts: Those over texts, which stand on the left; numbers stand on the right.
        wrapped: Those over what may take several lines.
    """
    table = _plain_table(_Table)
    for header in headers:
        justify: JustifyMethod = "left" if header in texts else "right"
        table.add_column(header, justify=justify, no_wrap=header not in wrapped)
    return table


def _plain_table(kind: type[Table] = Table) -> Table:
    return kind(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _PADDING, 0, 0))


def _width(column: Column) -> int:
    """Return how wide a column is to be: where its texts may be folded, not as the longest."""
    header, *cells = (cell_len(str(text)) for text in (column.header, *column.cells))
    widest = max(cells, default=0)
    return max(header, min(widest, _FOLDED) if column.overflow == "fold" else widest)
