"""Parsers of option values: (text, flag) -> value, or an error that names the flag."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import partial
from string import Template

from meshrun.errors import UsageError
from meshrun.host.named_files import read_small
from meshrun.plan.choices import TEMPLATE_FIELDS
from meshrun.plan.parse import parse_integer

_LONGEST_NAME = 1024


def as_written(text: str, _flag: str) -> str:
    """Return the text itself."""
    return text


def one(text: str, _flag: str) -> tuple[str, ...]:
    """Return the text as the only value."""
    return (text,)


def joined(text: str, _flag: str) -> tuple[str, ...]:
    """Return the values that one variable joins with ``;``."""
    return tuple(part.strip() for part in text.split(";") if part.strip())


def variables(text: str, _flag: str) -> tuple[str, ...]:
    """Return names that are separated by commas, semicolons or spaces."""
    return tuple(text.replace(";", " ").replace(",", " ").split())


def dims(text: str, _flag: str) -> tuple[str, ...]:
    """Return names of dims that are separated by commas or semicolons."""
    return joined(text.replace(",", ";"), _flag)


def names(text: str, _flag: str) -> tuple[str, ...]:
    """Return the items of a list; ``,,`` stands for a comma in an item."""
    parts = [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
    return tuple(part for part in parts if part)


positive = partial(parse_integer, least=1)
"""Returns an integer of at least 1."""
port = partial(parse_integer, most=65535)
"""Returns a TCP port."""


def listen_address(text: str, flag: str) -> tuple[str, int]:
    """Return the address and port of ``[HOST]:PORT``; the address is loopback if left out."""
    host, colon, number = text.rpartition(":")
    if not colon and not number.isdecimal():
        raise UsageError(
            f"{flag} expects [HOST]:PORT, found `{text}`", hint=f"for example: {flag} :9400"
        )
    return host.strip("[]") or "127.0.0.1", port(number, flag)


def short(text: str, flag: str) -> str:
    """Return a name that is short enough for ranks' variables and the paths of log files."""
    if len(text) > _LONGEST_NAME:
        raise UsageError(
            f"{flag} must be at most {_LONGEST_NAME} characters, found {len(text)}",
            hint="put longer text in a file and pass its path to the program",
        )
    return text


def template(text: str, flag: str) -> str:
    """Return a template for the prefix of a line."""
    for why, hint in unknown_fields(text):
        raise UsageError(f"{flag}: {why}", hint=hint)
    return text


def text_of_file(path: str, flag: str) -> str:
    """Return the content of a text file.

    Raises:
        UsageError: If it cannot be read, or is not text.
    """
    try:
        return read_small(path, errors="strict")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{flag} {path}: {why}") from error


def unknown_fields(text: str) -> Iterator[tuple[str, str]]:
    """Yield an error and a hint for each unknown field of a template."""
    for found in Template.pattern.finditer(text):
        name = found["named"] or found["braced"]
        if name and name not in TEMPLATE_FIELDS:
            near = get_close_matches(name, TEMPLATE_FIELDS, n=1)
            fields = ", ".join(f"${{{field}}}" for field in TEMPLATE_FIELDS)
            hint = f"did you mean `${{{near[0]}}}`?" if near else f"use {fields}, or $$ for $"
            yield f"unknown field `{found[0]}`", hint
