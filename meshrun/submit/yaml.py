"""Writes values as readable YAML with comments; quotes texts only where needed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that YAML 1.1 does not read as text."""
_INDENT = "  "


class Commented(Struct, frozen=True):
    """A value, and the comment above its key."""

    value: Any
    comment: str


def render_yaml(document: Mapping[str, Any]) -> str:
    """Return a document of mappings, lists, texts, numbers, booleans and nulls."""
    return "".join(f"{line}\n" for line in _mapping(document, ""))


def quote(text: str) -> str:
    """Return a text as a scalar that every YAML parser reads as this text.

    Example:
        >>> print(quote("train.py"), quote("yes"))
        train.py "yes"
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return f'"{"".join(map(_escape, text))}"'


def _escape(sign: str) -> str:
    if sign == '"':
        return '\\"'
    is_plain = sign.isprintable() and sign not in "\\\ufeff"
    return sign if is_plain else sign.encode("unicode_escape").decode()


def _mapping(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Commented):
            yield from (f"{indent}# {line}" for line in value.comment.splitlines())
            value = value.value  # noqa: PLW2901 - the value itself
        yield from _entry(f"{indent}{quote(key)}:", value, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, indent + _INDENT)
    elif isinstance(value, list) and value:
        yield head
        yield from _list(value, indent + _INDENT)
    else:
        yield f"{head} {_scalar(value)}"


def _list(values: list[Any], indent: str) -> Iterator[str]:
    for value in values:
        comment = value.comment.splitlines() if isinstance(value, Commented) else []
        yield from (f"{indent}# {line}" for line in comment)
        plain = value.value if isinstance(value, Commented) else value
        if isinstance(plain, Mapping) and plain:
            first, *rest = _mapping(plain, indent + _INDENT)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {_scalar(plain)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping | list):
        return "{}" if isinstance(value, Mapping) else "[]"
    return quote(str(value))
