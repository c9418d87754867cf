"""What a run of a program imported: for a warm server to import first, and for ``--watch``."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from msgspec import Struct

from meshrun.host.folder import open_private, write_private
from meshrun.host.named_files import open_nonblocking
from meshrun.host.users_files import is_installed, is_users_file, module_files, names_of
from meshrun.protocol.packing import pack, unpack

Stat = tuple[int, int]
"""Time of the last change in nanoseconds, and size in bytes; the size of a folder is 0."""

_OURS = ("meshrun", "threadpoolctl")
"""Packages that ranks import by themselves, as in :mod:`meshrun.worker.late_variables`."""


class ImportRecord(Struct, frozen=True, kw_only=True):
    """What a warm server needs to know about a program."""

    modules: list[str]
    """Installed modules that it imported, in the order in which their imports began."""
    changed: list[str]
    """Variables that it set or removed while it ran."""
    own_files: list[str]
    """Its own files."""


def record_imports(
    modules: Mapping[str, ModuleType], before: Mapping[str, str], after: Mapping[str, str]
) -> ImportRecord:
    """Return what a program that is about to end has imported, and changed in its environment."""
    return ImportRecord(
        modules=[name for name, module in modules.items() if _may_import(name, module)],
        changed=[
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ],
        own_files=sorted({path for _, path in module_files(modules) if is_own(path)}),
    )


def is_own(path: str) -> bool:
    """Return whether ``path`` is an existing file of the user's."""
    return is_users_file(path) and os.path.isfile(path)


def write_import_record(path: str, record: ImportRecord) -> None:
    """Write the record, whole or not at all; if its folder is gone, nothing is written."""
    with suppress(OSError):
        write_private(path, pack(record))


def read_import_record(path: str) -> ImportRecord | None:
    """Return the record, or ``None`` if it cannot be read."""
    try:
        with open(path, encoding="utf-8", opener=open_nonblocking) as file:
            record: ImportRecord = unpack(file.read(), ImportRecord)
    except (OSError, ValueError):
        return None
    return record


def stat_of(path: str) -> Stat | None:
    """Return when a file was changed and its size; ``None`` if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, 0 if stat.S_ISDIR(found.st_mode) else found.st_size


def _may_import(name: str, module: ModuleType) -> bool:
    held = names_of(module)
    spec, path = held.get("__spec__"), held.get("__file__")
    is_itself = isinstance(spec, ModuleSpec) and spec.name == name  # not an alias
    return (
        is_itself
        and isinstance(path, str)
        and is_installed(path)
        and name.partition(".")[0] not in _OURS
    )


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
