"""``sys.path`` as the program expects it, without shadowing torch's own imports.

``python train.py`` puts the script's folder first, so a ``grp.py`` or ``profile.py`` beside the
script breaks torch, which imports modules of these names. meshrun imports torch before the folder
is on the path, and then forgets the modules that the folder shadows, so that the program imports
its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

_OURS = "meshrun"


def holds(folder: str | None, modules: Iterable[str]) -> bool:
    """Return whether ``folder`` has one of ``modules`` and so must come first on the path."""
    if folder is None:
        return False
    return not _names_in(folder).isdisjoint(module.partition(".")[0] for module in modules)


@contextmanager
def on_path(folder: str | None) -> Iterator[None]:
    """Have ``folder`` in front of ``sys.path`` while the block runs; what imports add stays."""
    if folder is None:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # an import has removed it
            sys.path.remove(folder)


def put_first(folder: str | None, *, known_at_start: frozenset[str]) -> None:
    """Put ``folder`` in front of ``sys.path``, and forget the modules that its files shadow.

    Args:
        folder: The program's folder; ``None`` for none.
        known_at_start: Modules that an interpreter has loaded before its program, which a program
            does not shadow with ``python`` either.
    """
    if folder is None:
        return
    sys.path.insert(0, folder)
    shadowed = {
        name
        for name in _names_in(folder) & sys.modules.keys() - known_at_start - {_OURS}
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(folder + os.sep)
    }
    for name in list(sys.modules):
        if name.partition(".")[0] in shadowed:
            del sys.modules[name]


def _names_in(folder: str) -> set[str]:
    """Return the top-level names that can be imported from ``folder``."""
    names = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, _, ending = entry.name.partition(".")
                is_file = ending == "py" or ending.endswith("so")
                package = os.path.join(entry.path, "__init__.py")
                if is_file or (not ending and os.path.exists(package)):
                    names.add(stem)
    except OSError:  # an archive, or a folder that is gone
        pass
    return names
