"""``--help``: the table of options as a page of text; rich would take longer than all the rest."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import Any

from meshrun.cli.option import Option, ParsedOptions
from meshrun.host.descriptors import is_terminal

_ABOUT = """\
Launch a PyTorch program on every device and hand it a ready DeviceMesh.

{Usage:} meshrun [OPTIONS] SCRIPT [ARGS]...
       meshrun [OPTIONS] -m MODULE [ARGS]...

  meshrun --mesh 2x4 --names dp,tp train.py --lr 1e-3

In train.py, `from meshrun import current_mesh` and `mesh = current_mesh()`
give the torch.distributed DeviceMesh that was built before its first line.
Without --mesh, meshrun does what torchrun does."""
_ENVIRONMENT = (
    "Options can also be set in the environment: meshrun's own as MESHRUN_MESH, MESHRUN_SHOW"
    " and so on, torchrun's as PET_NPROC_PER_NODE and so on. --dry-run shows which value was used."
)
_COLUMN = 34
"""Where the texts begin."""
_WIDEST = 110


def render_help(table: type[ParsedOptions]) -> str:
    """Return the page for the terminal there is."""
    width = max(min(shutil.get_terminal_size().columns, _WIDEST), _COLUMN + 20)
    on, off = (
        ("\033[1m", "\033[0m") if is_terminal(1) and not os.environ.get("NO_COLOR") else ("", "")
    )
    rows = table.rows()
    panels = {
        panel: "\n".join(_entry(row, width, on, off) for row in rows if row.panel == panel)
        for panel in dict.fromkeys(row.panel for row in rows)
    }
    return "\n\n".join(
        [
            _ABOUT.replace("{", on).replace("}", off),
            *(f"{on}{panel}:{off}\n{entries}" for panel, entries in panels.items()),
            textwrap.fill(_ENVIRONMENT, width, break_on_hyphens=False),
        ]
    )


def _entry(row: Option[Any], width: int, on: str, off: str) -> str:
    """Return an option's lines: its flags, then its help beside or below them."""
    default = f" [default: {row.unset.replace('`', '')}]" if row.unset and row.takes_value else ""
    room = width - _COLUMN
    lines = textwrap.wrap(row.help + default, room, break_on_hyphens=False, break_long_words=False)
    flags = ", ".join(row.flags)
    begin = f"{'  ' if row.short else '      '}{flags} {row.metavar}".rstrip()
    if len(begin) < _COLUMN - 1:
        begin = begin.ljust(_COLUMN) + lines.pop(0)
    return "\n".join(
        [begin.replace(flags, f"{on}{flags}{off}", 1), *(" " * _COLUMN + line for line in lines)]
    )
