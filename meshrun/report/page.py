"""The console of a dry run, and the style of its tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Column, Table
from rich.text import Text

from meshrun.host.printable import printable
from meshrun.host.stderr import is_terminal

_PADDING = 2
_GAP = _PADDING + 1
"""Space between two columns, including the one that rich reserves for a line."""
_FOLDED = 24
"""Width beyond which texts in a wrapped column are folded."""


class Page(Console):
    """A console that prints texts as they are, and raises an error on a broken pipe."""

    def __init__(self) -> None:
        # rich may mistake other devices for a terminal.
        force = None if is_terminal(1) else False
        super().__init__(
            highlight=False, markup=False, emoji=False, soft_wrap=False, force_terminal=force
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as it is, but without control characters: options may contain any."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error that :func:`print` raises."""
        raise BrokenPipeError


class _Table(Table):
    """A table that is split if the window is too narrow, with the first column in each part.

    No header or value is truncated; a column that is too wide by itself is folded.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the whole table, or its parts."""
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
                yield ""
            yield part
        if self.caption:
            yield str(self.caption)

    def _parts(self, room: int) -> Iterator[list[Column]]:
        """Yield the columns of each part, each time with the first column."""
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
    headers: Iterable[str] = (),
    rows: Iterable[Iterable[str]] = (),
    *,
    texts: Collection[str] = (),
    wrapped: Collection[str] = (),
) -> Table:
    """Return a table without borders, with a line below its headers.

    Columns with ``texts`` are left-justified, others right-justified. Values of ``wrapped`` columns
    may take several lines.
    """
    table = _plain_table(_Table)
    for header in headers:
        justify: JustifyMethod = "left" if header in texts else "right"
        table.add_column(header, justify=justify, no_wrap=header not in wrapped)
    for row in rows:
        table.add_row(*row)
    return table


def _plain_table(kind: type[Table] = Table) -> Table:
    return kind(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _PADDING, 0, 0))


def _width(column: Column) -> int:
    """Return the width of a column, which in a wrapped one may be less than its longest text."""
    header, *cells = (cell_len(str(text)) for text in (column.header, *column.cells))
    widest = max(cells, default=0)
    return max(header, min(widest, _FOLDED) if column.overflow == "fold" else widest)
