"""A rank that a scheduler started (``--per-task``), as a new interpreter in its process.

eager|lazy KIND TARGET [ARGUMENT ...]
"""

from __future__ import annotations

import sys

from meshrun.plan.rank_program import Program, first_path
from meshrun.worker.imports import put_first
from meshrun.worker.program import format_raised, inspect_program, run_program


def main(known_at_start: frozenset[str]) -> None:
    """Build the mesh, and run the program."""
    when, *words = sys.argv[1:]
    program = Program.of_words(words)
    source = inspect_program(program)
    if when == "eager":
        from meshrun.mesh.current import current_mesh

        with source.settings.in_effect():
            current_mesh()
    put_first(first_path(program), known_at_start=known_at_start)
    run_program(program, source.code, _print_error)


def _print_error(error: BaseException) -> None:
    """Print an exception that leaves the program as the interpreter would, without our frames."""
    raised = format_raised(error)
    if raised.handled:
        return
    if isinstance(error, SystemExit) or sys.excepthook is sys.__excepthook__:
        sys.stderr.write(raised.traceback)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
