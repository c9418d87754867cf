"""The imports of a zygote and of ranks: which folder comes first, what follows them, which torch.

``python train.py`` puts the script's folder first, so a ``grp.py`` or ``profile.py`` beside the
script breaks torch, which imports modules of these names. meshrun imports torch before the folder
is on the path, and then forgets the modules that the folder shadows, so that the program imports
its own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from meshrun.errors import UsageError

_OURS = "meshrun"
_LEAST_PROMISED = (2, 10)
_LEAST_THAT_RUNS = (2, 8)
"""Before it, torch serves no store on a socket that is already listening."""


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


def when_imported(name: str, call: Callable[[], object]) -> Callable[[], None]:
    """Call ``call`` now if the module ``name`` is imported, otherwise right after its import.

    Returns:
        A function after which it is no longer called.
    """
    finder = _Finder(name, call)
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, finder)

    def forget() -> None:
        with suppress(ValueError):
            sys.meta_path.remove(finder)

    return forget


class _Finder(MetaPathFinder):
    """Finds one module with the other finders, and adds a call after its execution.

    A program may look for the module, and import it only later.
    """

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name, self._call = name, call
        self._asks_others = False

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(name)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._call()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def check_torch_version() -> None:
    """Raise UsageError if torch is imported and cannot run ranks."""
    if "torch" in sys.modules and (version := _version()) and version < _LEAST_THAT_RUNS:
        raise UsageError(_message())


def check_torch_is_supported() -> None:
    """Raise UsageError if an imported torch that lacks a module is too old or another module.

    A torch that meshrun does not promise to support is no error until then.
    """
    if not _version():
        raise UsageError(f"{_file()} is imported in place of torch", hint="rename it")
    if _version() < _LEAST_PROMISED:
        raise UsageError(_message())


def _message() -> str:
    version = sys.modules["torch"].__version__
    return f"meshrun requires torch 2.10 or newer, found {version}, {_file()}"


def _version() -> tuple[int, ...]:
    """Return the first two numbers of torch's version; empty if it has none."""
    text = str(getattr(sys.modules["torch"], "__version__", ""))
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _file() -> str:
    torch = sys.modules["torch"]
    return getattr(torch, "__file__", None) or next(iter(torch.__path__))
