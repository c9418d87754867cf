"""Checks that torch is not too old, before it fails in a less obvious way."""

from __future__ import annotations

import re
import sys

from meshrun.errors import UsageError

_LEAST_PROMISED = (2, 10)
_LEAST_THAT_RUNS = (2, 8)
"""Before it, torch serves no store on a socket that is already listening."""


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
