"""Distinction of the user's Python files from Python's, installed ones and meshrun's."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import ModuleType

_IN_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")


def _folders(*paths: str) -> tuple[str, ...]:
    """Return the given and the resolved paths of folders, each with a trailing slash."""
    return tuple(
        {os.path.join(find(path), "") for path in paths for find in (str, os.path.realpath)}
    )


LIBRARIES = _folders(*filter(None, map(sysconfig.get_path, _IN_PATHS)))
"""The folders of Python's standard library and of its installed packages."""
OURS = _folders(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder of this package."""
_TYPED = ("<cell ", "<stdin>", "<python-input-", "<ipython-input-")
"""Begin the names of what is typed at a prompt or in a notebook."""
_INSTALLED = ("/site-packages/", "/dist-packages/")


def names_of(module: object) -> dict[str, object]:
    """Return what a module in ``sys.modules`` holds, without running its code.

    Any attribute may: SpeechBrain's modules, for one, import others when one is read.
    """
    if not issubclass(type(module), ModuleType):
        return {}
    held: dict[str, object] = object.__getattribute__(module, "__dict__")
    return held


def module_files(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield the name and the absolute path of each module that has a file."""
    for name, module in list(modules.items()):
        path = names_of(module).get("__file__")
        if isinstance(path, str) and os.path.isabs(path):
            yield name, path


def is_installed(path: str | None) -> bool:
    """Return whether a file belongs to an installed package, of this or another environment."""
    if path is None:
        return False
    program = names_of(sys.modules.get("__main__")).get("__file__")
    own = os.path.dirname(program) if isinstance(program, str) else None
    return _names_packages(path) or path.startswith(
        _targets(tuple(sys.path), os.environ.get("PWD"), own)
    )


def _names_packages(path: str) -> bool:
    return any(folder in path for folder in _INSTALLED)


@lru_cache
def _targets(import_paths: tuple[str, ...], *own: str | None) -> tuple[str, ...]:
    """Return the folders that ``pip install --target`` has filled.

    Some deploy a program together with its packages; its folder and the working one do not count.
    """
    others = (os.path.join(path, "") for path in import_paths if path and path not in own)
    return tuple(path for path in others if not _names_packages(path) and _has_packages(path))


def _has_packages(folder: str) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return any(entry.name.endswith(".dist-info") for entry in entries)
    return False


def is_users_file(path: str) -> bool:
    """Return whether the path of a module or frame is a user's file, or what a user typed."""
    if path.startswith(_TYPED):
        return True
    return not (path.startswith(("<", *LIBRARIES, *OURS)) or is_installed(path))
