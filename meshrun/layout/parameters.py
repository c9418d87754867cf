"""Checks of arguments against the annotations of parameters."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from meshrun.errors import UsageError

_NUMBERS = {int: Integral, float: Real}
"""Abstract types, as numpy has numbers of its own."""
_WORDS: dict[Any, str] = {
    str: "a str", int: "an int", float: "a number", bool: "a bool", os.PathLike: "a path",
    Callable: "a function",
}  # fmt: skip


def check_parameters(annotated: Any, given: Mapping[str, object]) -> None:
    """Check values against the annotations of a function or a ``TypedDict``.

    Raises:
        UsageError: If a value has another type.
    """
    for name, kind in get_type_hints(annotated).items():
        if name in given:
            check_parameter(name, given[name], kind)


def check_parameter(name: str, value: object, kind: Any) -> None:
    """Check a value against an annotation.

    Raises:
        UsageError: If the value has another type.
    """
    if not _fits(value, kind):
        expected = ", ".join(_described(kind))
        head, comma, last = expected.rpartition(", ")
        expected = f"{head} or {last}" if comma else last
        hint = None
        if isinstance(value, str) and get_origin(kind) is Sequence:
            hint = f"for example: {name}={value.split()}"
        raise UsageError(f"{name} must be {expected}, found {reprlib.repr(value)}", hint=hint)


def _fits(value: object, kind: Any) -> bool:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if isinstance(value, bool):  # an int by inheritance only
        return origin in (bool, Any)
    if origin is Mapping:
        key, item = parts
        return isinstance(value, Mapping) and all(
            _fits(name, key) and _fits(each, item) for name, each in value.items()
        )
    if origin is Sequence:
        is_one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection)
        return not is_one and all(_fits(each, parts[0]) for each in cast(Any, value))
    is_unchecked = getattr(origin, "__module__", "") == "typing"  # Any, TextIO
    return is_unchecked or isinstance(value, _NUMBERS.get(origin, origin))


def _described(kind: Any) -> list[str]:
    """Return the types of a union in words, without ``None``, the value of omitted parameters."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return [word for part in parts if part is not NoneType for word in _described(part)]
    if origin is Mapping:
        return [f"a mapping of {_names(parts[0])} to {_names(parts[1])}"]
    if origin is Sequence:
        return ["a list" if parts[0] is Any else f"a list of {_names(parts[0])}"]
    return ["an object" if origin is Any else _WORDS.get(origin) or f"a {origin.__name__}"]


def _names(kind: Any) -> str:
    """Return the types of a union without articles: ``str or int``."""
    return " or ".join(word.partition(" ")[2] for word in _described(kind))
