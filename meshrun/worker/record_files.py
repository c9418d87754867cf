"""Records for ``--watch`` which files this rank runs: its program and what that imports."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import CodeType
from typing import Any

from meshrun.host.folder import open_private
from meshrun.host.users_files import is_users_file, module_files


def record_files(list_path: str) -> None:
    """Note the files imported so far, and later ones when they are compiled or, if cached, run.

    A file that does not compile is noted too, since the user is about to correct it.
    """
    noted: set[str] = set()

    def note(path: object) -> None:
        if not isinstance(path, str) or path in noted or not os.path.isabs(path):
            return
        noted.add(path)
        if not is_users_file(path):
            return
        with suppress(OSError):  # the file is gone, or the watcher is about to end
            line = f"{os.stat(path).st_mtime_ns} {path}\0"
            with open(list_path, "ab", opener=open_private) as file:
                file.write(os.fsencode(line))

    def on_audit_event(event: str, args: tuple[Any, ...]) -> None:
        if event == "compile":
            note(args[1])
        elif event == "exec" and isinstance(args[0], CodeType):
            note(args[0].co_filename)

    for _, path in module_files(sys.modules):
        note(path)
    sys.addaudithook(on_audit_event)
