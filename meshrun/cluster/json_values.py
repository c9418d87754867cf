"""JSON in variables and files, from systems that write it: what is not as it should be is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshrun.cluster.numbers import broken


def read_json(env: Mapping[str, str], name: str) -> Any:
    """Return the value in a variable.

    Raises:
        UsageError: If it is no JSON.
    """
    try:
        return json.loads(env[name])
    except (ValueError, RecursionError):
        raise broken(env, name, "JSON") from None


def names_in(value: Any) -> tuple[str, ...]:
    """Return the texts of a list; nothing if it is none, or has something else in it."""
    is_list = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    return tuple(value) if is_list else ()


def index_in(value: Any, count: int) -> int | None:
    """Return a number below ``count``; ``None`` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, str) and not (value.isascii() and value.isdecimal() and len(value) < 10):
        return None
    return int(value) if 0 <= int(value) < count else None
