"""JSON values from schedulers' variables and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshrun.cluster.numbers import invalid


def read_json(env: Mapping[str, str], name: str) -> Any:
    """Return the value of a variable.

    Raises:
        UsageError: If it is not JSON.
    """
    try:
        return json.loads(env[name])
    except (ValueError, RecursionError):
        raise invalid(env, name, "JSON") from None


def names_in(value: Any) -> tuple[str, ...]:
    """Return a list of non-empty strings; an empty tuple if ``value`` is anything else."""
    is_list = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    return tuple(value) if is_list else ()


def index_in(value: Any, count: int) -> int | None:
    """Return an integer, or the digits of one, below ``count``; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, str) and not (value.isascii() and value.isdecimal() and len(value) < 10):
        return None
    return int(value) if 0 <= int(value) < count else None
