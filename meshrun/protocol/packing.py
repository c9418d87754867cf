"""Encodes values as JSON, ``[name of the class, its fields]``; validates what it decodes. Pure.

Messages to the zygote and between launchers share it, so both are validated alike. An annotation
``Annotated[type, check, ...]`` adds checks to a type: functions that return the value, perhaps
sanitized for display, or raise ValueError. :data:`BY_CLOCK` is among them for times.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

_PLAIN = (int, float, str, bool, type(None))
BY_CLOCK = "by the sender's clock"
"""Marks an annotation of times, which are converted to the receiver's clock."""


class Sender(Struct, frozen=True):
    """How to take values of the process that sent them."""

    sanitize: Callable[[str], str] = str
    """Applied to each string, for display."""
    ahead_ns: int = 0
    """How far its monotonic clock is ahead of ours."""


_HERE = Sender()


class Within(Struct, frozen=True):
    """A number of at least ``least`` and at most ``most``."""

    least: int
    most: int

    def __call__(self, value: float) -> float:
        """Return the number."""
        if not self.least <= value <= self.most:
            raise ValueError(f"{value} is not from {self.least} to {self.most}")
        return value


def to_builtins(value: Any) -> Any:
    """Return a Struct, or a list of them, as plain values."""
    return msgspec.to_builtins(value, enc_hook=_to_plain)


def _to_plain(value: object) -> object:
    """Return the value of a subclass, such as the string that is torch's version, as its base."""
    return json.loads(json.dumps(value))


def pack(value: Any) -> bytes:
    """Return a Struct as text."""
    return pack_fields(type(value), to_builtins(value))


def pack_fields(kind: type[Any], values: Mapping[str, object]) -> bytes:
    """Return the fields of a Struct ``kind`` as text."""
    return json.dumps([kind.__name__, values]).encode()


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unpack(text: str | bytes, kinds: Any, sender: Sender = _HERE) -> Any:
    """Return the value that ``pack`` encoded; fields with a default may be missing.

    Args:
        text: The received text.
        kinds: The class that it is, or a union of those that it may be.
        sender: How to take its values.

    Raises:
        ValueError: If it is none of ``kinds``, or a field has an invalid value.
    """
    try:
        name, values = read_json(text)
        return convert(_by_name(kinds)[name], values, sender)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"not a message: {text[:80]!r}") from error


def convert(hint: Any, value: Any, sender: Sender = _HERE) -> Any:
    """Return a JSON value converted to an annotation's type.

    Raises:
        TypeError: If it has another type.
        ValueError: If the annotation does not allow it.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _convert_checked(args[0], hint.__metadata__, value, sender)
    if origin in (Union, types.UnionType):
        return _convert_one_of(args, value, sender)
    if origin is Literal:
        return _convert_literal(args, value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_convert_each(args[0], value, sender))
    if isinstance(value, dict) and hint is not Any:
        return _convert_table(hint, value, sender)
    return _convert_plain(hint, value, sender)


def _convert_checked(hint: Any, checks: tuple[Any, ...], value: Any, sender: Sender) -> Any:
    converted = convert(hint, value, sender)
    for check in checks:
        is_time = check is BY_CLOCK
        converted = converted - sender.ahead_ns if is_time else check(converted)
    return converted


def _convert_each(hint: Any, values: list[Any], sender: Sender) -> Iterable[Any]:
    if hint is str and sender.sanitize is str and {*map(type, values)} == {str}:
        return values  # fast, as there may be a thousand
    return (convert(hint, each, sender) for each in values)


def _convert_literal(allowed: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{value!r:.80} is none of {allowed}")
    return value


def _convert_one_of(hints: tuple[Any, ...], value: Any, sender: Sender) -> Any:
    for hint in hints:
        try:
            return convert(hint, value, sender)
        except TypeError:
            continue
    raise TypeError(f"{value!r:.80} is none of {hints}")


def _convert_table(kind: Any, values: dict[str, Any], sender: Sender) -> Any:
    if get_origin(kind) in (dict, Mapping):
        name, of = get_args(kind)
        is_number = (get_args(name) or [name])[0] is int  # JSON's keys are strings
        return {
            convert(name, int(key) if is_number else key, sender): convert(of, each, sender)
            for key, each in values.items()
        }
    if not (isinstance(kind, type) and (issubclass(kind, Struct) or is_dataclass(kind))):
        raise TypeError(f"a table is not {kind}")
    hints = _hints(kind)
    if wrong := values.keys() - hints.keys():
        raise ValueError(f"{kind} and {wrong}")
    return kind(**{name: convert(hints[name], each, sender) for name, each in values.items()})


def _convert_plain(hint: Any, value: Any, sender: Sender) -> Any:
    if hint is Any:
        return value
    kinds = (int, float) if hint is float else hint
    is_truth = isinstance(value, bool)
    if hint not in _PLAIN or not isinstance(value, kinds) or is_truth != (hint is bool):
        raise TypeError(f"{value!r:.80} is not {hint}")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("not a number")
    return sender.sanitize(value) if isinstance(value, str) else value


@cache
def _by_name(kinds: Any) -> dict[str, Any]:
    return {kind.__name__: kind for kind in get_args(kinds) or (kinds,)}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
