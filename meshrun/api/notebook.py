"""``%load_ext meshrun``: runs cells of a notebook or of IPython on the ranks of a mesh."""

from __future__ import annotations

import argparse
import ast
import atexit
import shlex
import traceback
from typing import TYPE_CHECKING, Any

from meshrun.errors import UsageError
from meshrun.host.stderr import note
from meshrun.wording import count

if TYPE_CHECKING:
    from meshrun.api.worker_group import WorkerGroup

Filters = dict[str, list[str]]
"""The values of ``--show`` and ``--hide``."""
_USAGE = (
    "%%mesh dp=2,tp=2 [OPTION ...] runs a cell on the ranks of a mesh, %%mesh on those that are"
    " running, %mesh shows them, %mesh stop ends them"
)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics ``%%mesh`` and ``%mesh``."""
    cells = _Cells(shell)
    shell.register_magic_function(cells.run, "cell", "mesh")
    shell.register_magic_function(cells.show, "line", "mesh")
    shell.meshrun_cells = cells


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks."""
    shell.meshrun_cells.stop()


class _Interrupted(KeyboardInterrupt):
    """An interrupt of a cell, which a notebook shows without meshrun's frames."""

    def _render_traceback_(self) -> list[str]:
        return ["KeyboardInterrupt"]


class _Cells:
    """The ranks of a notebook, with one mesh at a time."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._group: WorkerGroup | None = None
        self._words: list[str] = []
        """The mesh and the options with which the ranks were started."""
        self._count = 0

    def run(self, line: str, cell: str) -> None:
        """Run a cell on every rank of the mesh that ``line`` names, or of the last one."""
        try:
            self._run(line, cell)
        except KeyboardInterrupt:
            raise _Interrupted from None
        except SyntaxError as error:  # shown without the frames that lead to it
            from meshrun.api.group_cells import CellFailed

            text = "".join(traceback.format_exception_only(error))
            raise CellFailed(text.rstrip(), error) from None

    def _run(self, line: str, cell: str) -> None:
        from meshrun.api.group_cells import run_on_ranks

        self._count += 1
        name = f"<cell {self._count}>"
        cell = self._shell.transform_cell(cell)
        _check_commands(ast.parse(cell, name))
        line = line.strip()
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"%%mesh cannot read `{line}`: {error}", hint=_USAGE) from error
        filters, words = _split_filters(words)
        group = self._group_for(words, filters)
        run_on_ranks(group, cell, name, hidden=_hidden(group, filters))

    def show(self, line: str) -> None:
        """Print the mesh and the number of ranks; ``%mesh stop`` ends them."""
        if line.strip() == "stop":
            self.stop()
        elif line.strip():
            raise UsageError(f"%mesh takes only `stop`, found `{line.strip()}`", hint=_USAGE)
        elif self._group is None or not self._group.is_open:
            print("no ranks")
        else:
            print(f"{shlex.join(self._words)}: {count(len(self._group.labels), 'rank')}")

    def stop(self) -> None:
        """End the ranks."""
        if self._group is not None:
            atexit.unregister(self._group.end)
            self._group.end()
        self._group = None

    def _group_for(self, words: list[str], filters: Filters) -> WorkerGroup:
        from meshrun.api.launch import check_by_dry_run
        from meshrun.api.worker_group import WorkerGroup

        words = words or self._words
        group = self._group
        if group is not None and group.is_open and words == self._words:
            return group
        if not words or words[0].startswith("-"):
            found = f"found `{shlex.join(words)}`" if words else "as no ranks are running"
            raise UsageError(f"%%mesh needs a mesh, {found}", hint=_USAGE)
        mesh, *options = words
        if group is not None:  # a typo must not cost the variables of the old ranks
            shown = [f"{flag}={where}" for flag in filters for where in filters[flag]]
            check_by_dry_run(["--mesh", mesh, *options, *shown])
            if group.is_open:
                note(
                    f"`{shlex.join(words)}` needs different ranks than"
                    f" `{shlex.join(self._words)}`; the variables of the old ranks are lost"
                )
        self.stop()
        self._group, self._words = WorkerGroup(mesh=mesh, options=options), words
        atexit.register(self._group.end)
        return self._group


def _split_filters(words: list[str]) -> tuple[Filters, list[str]]:
    """Return the values of ``--show`` and ``--hide``, which need no new ranks, and other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--show", "--hide"):
        parser.add_argument(flag, dest=flag, action="append", default=[])
    try:
        found, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"%%mesh: {error.argument_name}: {error.message}") from error
    return vars(found), others


def _hidden(group: WorkerGroup, filters: Filters) -> frozenset[int]:
    """Return the ranks whose values are not printed."""
    if not any(filters.values()):
        return frozenset()
    from meshrun.layout.selection import ranks_shown
    from meshrun.mesh.current_layout import current_layout

    layout = group.call(current_layout)[0]
    shown = ranks_shown(layout, filters["--show"], filters["--hide"])
    return frozenset(range(layout.world_size)) - shown


def _check_commands(tree: ast.AST) -> None:
    """Raise UsageError if a cell for ranks uses a command of IPython other than ``!command``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Name(id="get_ipython")),
                    attr="run_line_magic" | "run_cell_magic" as kind,
                ),
                args=[ast.Constant(value=str(name)), *_],
            ):
                mark = "%" if kind == "run_line_magic" else "%%"
                raise UsageError(
                    f"%%mesh: `{mark}{name}` is a command of IPython, which does not run on ranks",
                    hint="put it in a separate cell, without %%mesh; `!command` runs on ranks",
                )
