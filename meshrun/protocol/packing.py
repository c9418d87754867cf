"""Encodes values as JSON, ``[name of the class, its fields]``; validates what it decodes. Pure.

Messages to the zygote and between launchers share it, so both are validated alike: the types here
say which values a field may have.
"""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
from msgspec import Meta

from meshrun.host.printable import one_line

_LATEST_NS = 2**62
_MOST = 2**31

if TYPE_CHECKING:
    Line = str
    Time = int
else:
    # `convert` checks these itself, as msgspec does not know them.
    class Line(ABC):  # noqa: B024 - stands for str
        """Text to display, sanitized."""

    class Time(ABC):  # noqa: B024 - stands for int
        """Monotonic nanoseconds by the receiver's clock, as far as it knows the sender's."""

    Line.register(str)
    Time.register(int)

ClockTime = Annotated[int, Meta(ge=-_LATEST_NS, le=_LATEST_NS)]
"""Monotonic nanoseconds by the sender's clock."""
ExitCode = Annotated[int, Meta(ge=0, le=255)]
Signum = Annotated[int, Meta(ge=0, le=64)]
"""A signal, or 0 for none."""
Rank = Annotated[int, Meta(ge=0, le=_MOST)]
Generation = Annotated[int, Meta(ge=0, le=_MOST)]
Size = Annotated[int, Meta(ge=0, le=_MOST)]
"""How many ranks or nodes."""
Seconds = Annotated[float, Meta(ge=0, le=10**12)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Secret = Annotated[str, Meta(max_length=64)]


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


def unpack(
    text: str | bytes,
    kinds: Any,
    *,
    sanitize: Callable[[str], str] | None = None,
    ahead_ns: int = 0,
) -> Any:
    """Return the value that ``pack`` encoded; fields with a default may be missing.

    Fields that its class does not have are ignored.

    Args:
        text: The received text.
        kinds: The class that it is, or a union of those that it may be.
        sanitize: Applied to each string, for display.
        ahead_ns: How far the sender's monotonic clock is ahead of ours.

    Raises:
        ValueError: If it is none of ``kinds``, or a field has an invalid value.
    """
    try:
        name, values = read_json(text)
        if sanitize is not None:
            values = _sanitized(values, sanitize)
        return convert(_by_name(kinds)[name], values, ahead_ns)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a message: {text[:80]!r}") from error


def convert(kind: Any, value: Any, ahead_ns: int = 0) -> Any:
    """Return a JSON value converted to a type; ``ahead_ns`` as for :func:`unpack`.

    Raises:
        ValueError: If it is not of that type.
    """
    check = partial(_checked, ahead_ns=ahead_ns)
    try:
        return msgspec.convert(value, kind, str_keys=True, dec_hook=check)
    except msgspec.ValidationError as error:  # a ValueError since msgspec 0.21
        raise ValueError(str(error)) from error


def _checked(kind: Any, value: Any, ahead_ns: int) -> object:
    """Return a value for one of the abstract types."""
    if kind is Time:
        return msgspec.convert(value, ClockTime) - ahead_ns
    return one_line(msgspec.convert(value, str))


def _sanitized(value: Any, sanitize: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, list):
        return [_sanitized(each, sanitize) for each in value]
    if isinstance(value, dict):
        return {sanitize(name): _sanitized(each, sanitize) for name, each in value.items()}
    return value


@cache
def _by_name(kinds: Any) -> dict[str, Any]:
    return {kind.__name__: kind for kind in get_args(kinds) or (kinds,)}
