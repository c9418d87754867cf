"""Dataclasses as JSON and back, ``[name of the type, its fields]``, checked when read. Pure.

Both kinds of messages use it, so that neither takes what the other would refuse. An annotation may
ask for more than a type: what stands in ``Annotated`` beside it takes each value and returns it,
perhaps made fit to be shown, or raises ValueError.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class Within:
    """A number of at least ``least`` and at most ``most``."""

    least: int
    most: int

    def __call__(self, value: float) -> float:
        """Return the number."""
        if not self.least <= value <= self.most:
            raise ValueError(f"{value} is not from {self.least} to {self.most}")
        return value


def pack(kind: type[Any], values: Mapping[str, object]) -> bytes:
    """Return the fields of a ``kind`` as text."""
    return json.dumps([kind.__name__, values]).encode()


def read_json(text: str | bytes) -> Any:
    """Return what a text of JSON says.

    Raises:
        ValueError: If it is none, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unpack(text: bytes, kinds: Mapping[str, type[Any]], clean: Callable[[str], str] = str) -> Any:
    """Return what ``pack`` made ``text`` of; fields with a default may be missing.

    Args:
        text: What was received.
        kinds: What it may be, by name.
        clean: Makes each text in it fit to be shown.

    Raises:
        ValueError: If it is none of ``kinds``, or a field has a value that it cannot have.
    """
    try:
        name, values = read_json(text)
        return take(kinds[name], values, clean)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"not a message: {text[:80]!r}") from error


def take(hint: Any, value: Any, clean: Callable[[str], str] = str) -> Any:
    """Return a value of JSON as an annotation has it.

    Raises:
        TypeError: If it has another type.
        ValueError: If it is none that the annotation allows.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _take_checked(args[0], hint.__metadata__, value, clean)
    if origin in (Union, types.UnionType):
        return _take_one_of(args, value, clean)
    if origin is Literal:
        return _take_literal(args, value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_take_each(args[0], value, clean))
    if isinstance(value, dict) and hint is not Any:
        return _take_table(hint, value, clean)
    return _take_plain(hint, value, clean)


def _take_checked(
    hint: Any, checks: tuple[Any, ...], value: Any, clean: Callable[[str], str]
) -> Any:
    taken = take(hint, value, clean)
    for check in checks:
        taken = check(taken)
    return taken


def _take_each(hint: Any, values: list[Any], clean: Callable[[str], str]) -> Iterable[Any]:
    if hint is str and clean is str and {*map(type, values)} == {str}:
        return values  # a thousand of them, at times
    return (take(hint, each, clean) for each in values)


def _take_literal(allowed: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{value!r:.80} is none of {allowed}")
    return value


def _take_one_of(hints: tuple[Any, ...], value: Any, clean: Callable[[str], str]) -> Any:
    for hint in hints:
        try:
            return take(hint, value, clean)
        except TypeError:
            continue
    raise TypeError(f"{value!r:.80} is none of {hints}")


def _take_table(kind: Any, values: dict[str, Any], clean: Callable[[str], str]) -> Any:
    if get_origin(kind) in (dict, Mapping):
        name, of = get_args(kind)
        is_number = (get_args(name) or [name])[0] is int  # JSON's names are texts
        return {
            take(name, int(key) if is_number else key, clean): take(of, each, clean)
            for key, each in values.items()
        }
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"a table is not {kind}")
    hints = _hints(kind)
    if wrong := values.keys() - hints.keys():
        raise ValueError(f"{kind} and {wrong}")
    return kind(**{name: take(hints[name], each, clean) for name, each in values.items()})


def _take_plain(hint: Any, value: Any, clean: Callable[[str], str]) -> Any:
    if hint is Any:
        return value
    kinds = (int, float) if hint is float else hint
    is_truth = isinstance(value, bool)
    if hint not in _PLAIN or not isinstance(value, kinds) or is_truth != (hint is bool):
        raise TypeError(f"{value!r:.80} is not {hint}")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("no number")
    return clean(value) if isinstance(value, str) else value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
