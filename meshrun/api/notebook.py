"""``%load_ext meshrun``: cells of a notebook, or of IPython, that run on the ranks of a mesh."""

from __future__ import annotations

import ast
import atexit
import shlex
from typing import TYPE_CHECKING, Any

from meshrun.errors import UsageError

if TYPE_CHECKING:
    from meshrun.api.worker_group import WorkerGroup

_USAGE = "%%mesh dp=2,tp=2 [OPTION ...], as of the command line; or %mesh, %mesh stop"


def load_ipython_extension(shell: Any) -> None:
    """Register the magics ``%%mesh`` and ``%mesh``."""
    cells = _Cells()
    shell.register_magic_function(cells.run, "cell", "mesh")
    shell.register_magic_function(cells.show, "line", "mesh")
    shell.meshrun_cells = cells


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks."""
    shell.meshrun_cells.stop()


class _Cells:
    """The ranks of a notebook: those of one mesh at a time."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None
        self._line = ""
        self._count = 0

    def run(self, line: str, cell: str) -> None:
        """Run a cell on every rank of this mesh; without one, of the mesh before."""
        from meshrun.api.group_cells import run_on_ranks

        self._count += 1
        name = f"<cell {self._count}>"
        ast.parse(cell, name)
        run_on_ranks(self._group_for(line.strip()), cell, name)

    def show(self, line: str) -> None:
        """``%mesh``: say which ranks there are; ``%mesh stop``: end them."""
        if line.strip() == "stop":
            self.stop()
        elif line.strip():
            raise UsageError(f"%mesh: found `{line.strip()}`", hint=_USAGE)
        elif self._group is None or not self._group.is_open:
            print("no ranks")
        else:
            print(f"{self._line}: {len(self._group.labels)} ranks")

    def stop(self) -> None:
        """End the ranks."""
        if self._group is not None:
            atexit.unregister(self._group.close)
            self._group.close()
        self._group = None

    def _group_for(self, line: str) -> WorkerGroup:
        from meshrun.api.launch import check_options
        from meshrun.api.worker_group import WorkerGroup

        if self._group is not None and self._group.is_open and line in ("", self._line):
            return self._group
        line = line or self._line
        try:
            mesh, *options = shlex.split(line) or [""]
        except ValueError as error:
            raise UsageError(f"%%mesh cannot read `{line}`: {error}", hint=_USAGE) from error
        if not mesh or mesh.startswith("-"):
            raise UsageError(f"%%mesh needs a mesh, found `{line}`", hint=_USAGE)
        if self._group is not None:  # whose variables a slip is not to lose
            check_options(["--mesh", mesh, *options])
        self.stop()
        self._group, self._line = WorkerGroup(mesh=mesh, options=options), line
        atexit.register(self._group.close)
        return self._group
