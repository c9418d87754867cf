"""Dataclasses as JSON and back, ``[name of the type, its fields]``, checked on the way in. Pure.

Both kinds of messages use it, so that neither takes what the other would refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def pack(kind: type[Any], values: Mapping[str, object]) -> bytes:
    """Return the fields of a ``kind`` as text."""
    return json.dumps([kind.__name__, values]).encode()


def unpack(text: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    """Return what ``pack`` made ``text`` of; fields with a default may be missing.

    Raises:
        ValueError: If it is none of ``kinds``, or a field has a value of another type.
    """
    try:
        kind, values = json.loads(text)
        unpacked = kinds[kind](**values)
        for field in fields(unpacked):
            _check(str(field.type), getattr(unpacked, field.name))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a message: {text[:80]!r}") from error
    return unpacked


def _check(annotation: str, value: Any) -> None:
    """Check a value; annotations are text here, as the modules postpone them."""
    outer, _, inner = annotation.rstrip("]").partition("[")
    if annotation == "Any":
        return
    if outer == "list" and isinstance(value, list):
        for each in value:
            _check(inner, each)
    elif outer == "dict" and isinstance(value, dict):
        for each in value.values():
            _check(inner.rpartition(", ")[2], each)
    else:
        expected = sum((_PLAIN.get(name, ()) for name in annotation.split(" | ")), ())
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise TypeError(f"{value!r} is not {annotation}")
