"""What a run of a program imported, for a warm server to import before the next one."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import ModuleType

from meshrun.host.users_files import is_installed, is_users_file
from meshrun.host.whole_file import open_at_once
from meshrun.protocol.packing import read_json, take

Stat = tuple[int, int]
"""Time of the last change in nanoseconds, and size in bytes; the size of a folder is 0."""

_OURS = ("meshrun", "threadpoolctl")
"""What ranks may import whatever their program is, :mod:`meshrun.worker.threads` among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a warm server needs to know of a program."""

    modules: list[str]
    """Installed modules that it imported, in the order in which they were begun."""
    changed: list[str]
    """Variables that it set or removed while it ran."""
    own_files: list[str]
    """The files of its own that it was made of."""


def learn(
    modules: Mapping[str, ModuleType], before: Mapping[str, str], after: Mapping[str, str]
) -> Learnt:
    """Return what a program that is about to end can tell.

    Args:
        modules: ``sys.modules``.
        before: The environment as the program found it.
        after: As it is now.
    """
    own = set()
    for module in list(modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and is_own(path):
            own.add(path)
    return Learnt(
        modules=[name for name, module in modules.items() if _may_import(name, module)],
        changed=[
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ],
        own_files=sorted(own),
    )


def is_own(path: str) -> bool:
    """Whether there is such a file, and it is the user's."""
    return is_users_file(path) and os.path.isabs(path) and os.path.isfile(path)


def write_learnt(path: str, learnt: Learnt) -> None:
    """Write it, whole or not at all; a folder that is gone is none of the program's business."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "x") as file:
            file.write(json.dumps(asdict(learnt)))  # several times as fast as json.dump
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)


def read_learnt(path: str) -> Learnt | None:
    """Return what was written there, if anything can be read."""
    try:
        with open(path, opener=open_at_once) as file:
            learnt: Learnt = take(Learnt, read_json(file.read()))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return learnt


def stat_of(path: str) -> Stat | None:
    """Return when a file was changed and how long it is; ``None`` if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, 0 if stat.S_ISDIR(found.st_mode) else found.st_size


def _may_import(name: str, module: ModuleType) -> bool:
    spec, path = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    is_itself = spec is not None and spec.name == name  # no other name of it
    return is_itself and is_installed(path) and not _is_ours(name)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in _OURS
