"""Calls a function once a module has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


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
