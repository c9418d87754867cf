"""Tells ``--watch`` which files this rank runs: its program and what that imports."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import CodeType
from typing import Any

from meshrun.host.folder import open_private
from meshrun.host.users_files import is_users_file

WATCH = "MESHRUN_WATCH_FILE"
"""The variable with the file that is appended to: ``MTIME_NS PATH`` and NUL for each."""


def note_files(list_path: str) -> None:
    """Note what was imported, and from now on what is: as soon as it is compiled, or else run.

    A file that cannot be compiled is one that somebody is about to correct.
    """
    noted: set[str] = set()

    def note(path: object) -> None:
        if not isinstance(path, str) or path in noted or not os.path.isabs(path):
            return
        noted.add(path)
        if not is_users_file(path):
            return
        with suppress(OSError):  # it is gone, or whoever watches is about to end
            line = f"{os.stat(path).st_mtime_ns} {path}\0"
            with open(list_path, "ab", opener=open_private) as file:
                file.write(os.fsencode(line))

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "compile":
            note(args[1])
        elif event == "exec" and isinstance(args[0], CodeType):
            note(args[0].co_filename)

    for module in list(sys.modules.values()):
        note(getattr(module, "__file__", None))
    sys.addaudithook(hear)
