"""Runs cells on all ranks of a group; prints values by coordinate, and raises what ranks raise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from meshrun.api.child_launcher import write_text
from meshrun.api.remote_call import RankTraceback
from meshrun.api.worker_group import GroupLost, WorkerGroup
from meshrun.errors import MeshrunError
from meshrun.host.stderr import note, say
from meshrun.worker.cells import run_cell


class CellFailed(MeshrunError):
    """A cell raised an exception on a rank; the message is its traceback."""

    def __init__(self, message: str, error: BaseException) -> None:
        super().__init__(message)
        self.error = error

    def _render_traceback_(self) -> list[str]:
        return self.message.splitlines()


def run_on_ranks(
    group: WorkerGroup,
    cell: str,
    name: str,
    *,
    only: int | None = None,
    hidden: Collection[int] = (),
    is_last: bool = False,
) -> None:
    """Run a cell on all ranks, or on one, and print values by coordinate except of ``hidden``.

    Raises:
        CellFailed: And all other exceptions of :func:`call_on_ranks`.
    """
    labels = group.labels
    texts: dict[str, list[str]] = {}
    values = call_on_ranks(group, run_cell, cell, name, only, hidden, is_last=is_last)
    for rank, (label, value) in enumerate(zip(labels, values, strict=True)):
        if value is not None and rank not in hidden:
            texts.setdefault(value, []).append(label)
    for text, who in texts.items():
        if sys.stdout is not None:
            shown = "all" if len(who) == len(labels) else ", ".join(who)
            write_text(sys.stdout, f"[{shown}] {text}\n")


def call_on_ranks(
    group: WorkerGroup, function: Callable[..., Any], *args: Any, is_last: bool = False
) -> list[Any]:
    """Call a function on all ranks for an interactive user; return what each rank returned.

    If ranks are lost, a note says that new ones will start, unless the call ``is_last``.

    Raises:
        CellFailed: With the exception of the first rank that raised one.
        GroupLost: If not all ranks have finished.
        KeyboardInterrupt: If the call was interrupted.
    """
    failed: CellFailed
    try:
        return group.make_call(function, args)
    except KeyboardInterrupt as error:
        if isinstance(error.__cause__, GroupLost):
            say(str(error.__cause__))
        raise
    except GroupLost:
        raise
    except SystemExit as error:
        failed = CellFailed(f"SystemExit: {error}", error)
    except BaseException as error:
        cause = error.__cause__
        text = cause.text if isinstance(cause, RankTraceback) else str(error)
        failed = CellFailed(text.strip(), error)
    finally:
        if not (group.is_open or is_last):
            note(
                "the ranks were stopped and their variables are lost; new ranks start with the next"
                " input"
            )
    raise failed  # here, as IPython prints an exception group in its context, with our frames
