"""What the pages of a dry run are made of: a console, and tables that all look alike."""

from __future__ import annotations

from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from meshrun.host.descriptors import is_terminal


class Page(Console):
    """A console that leaves a reader who went away to the caller, instead of exiting with 1."""

    def __init__(self) -> None:
        # Whatever rich makes of a descriptor that only looks like a terminal.
        plain = None if is_terminal(1) else False
        super().__init__(highlight=False, soft_wrap=False, force_terminal=plain)

    def on_broken_pipe(self) -> NoReturn:
        """Raise what :func:`print` raises."""
        raise BrokenPipeError


def new_table() -> Table:
    """Return a table without borders, with a line below its headers."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
