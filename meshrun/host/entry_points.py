"""Plug-ins of installed packages, found by their entry points without ``importlib.metadata``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any

from meshrun.errors import MeshrunError, UsageError

_HINT = "update or uninstall the package that provides it"


def files_of_packages() -> Iterator[Path]:
    """Yield the paths where packages on ``sys.path`` may list their entry points."""
    for folder in dict.fromkeys(sys.path):
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                yield Path(folder, name, "entry_points.txt")


def entry_points(group: str) -> dict[str, str]:
    """Return ``module:attribute`` of each entry point of a group, by name; the first one wins.

    Importing ``importlib.metadata`` would take longer than this.
    """
    found: dict[str, str] = {}
    for path in files_of_packages():
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        if f"[{group}]" in text:
            for name, value in _section(text, group):
                found.setdefault(name, value)
    return found


def load(group: str, name: str, value: str) -> Any:
    """Return the object that an entry point names.

    Raises:
        UsageError: If it cannot be imported.
    """
    try:
        return resolve_name(value.partition("[")[0].replace(" ", ""))
    except Exception as error:
        raise UsageError(
            f"cannot load the plugin `{name}` of {group}: {value}: {type(error).__name__}: {error}",
            hint=_HINT,
        ) from error


def call(
    group: str, name: str, plug_in: Callable[..., Any], *args: object, returns: tuple[type, ...]
) -> Any:
    """Return what a plug-in returns for these arguments, a value of one of the types.

    Raises:
        UsageError: If it returns another, or raises an exception that is not meshrun's.
    """
    try:
        value = plug_in(*args)
    except MeshrunError:
        raise
    except Exception as error:
        own = error.__traceback__ and error.__traceback__.tb_next
        place = f" at {own.tb_frame.f_code.co_filename}:{own.tb_lineno}" if own else ""
        raise UsageError(
            f"the plugin `{name}` of {group} raised {type(error).__name__}{place}: {error}",
            hint=_HINT,
        ) from error
    if isinstance(value, returns):
        return value
    types = " or ".join("None" if kind is NoneType else kind.__name__ for kind in returns)
    raise UsageError(
        f"the plugin `{name}` of {group} returned {type(value).__name__}, not {types}", hint=_HINT
    )


def _section(text: str, group: str) -> Iterator[tuple[str, str]]:
    is_in = False
    for line in text.splitlines():
        if line.startswith("["):
            is_in = line.strip() == f"[{group}]"
        elif is_in and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()
