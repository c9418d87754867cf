"""Numbers and JSON in variables, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshrun.errors import UsageError

_MOST = 2**32  # Slurm's special step ids are just below
_SHOWN = 60


def read_number(env: Mapping[str, str], *names: str, least: int = 0) -> int | None:
    """Return the number in the first variable that is set, ``None`` if none is.

    Raises:
        UsageError: If it is not a whole number of at least ``least``.
    """
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return None
    text = env[name]
    number = (
        int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST)) else -1
    )
    if not least <= number < _MOST:
        raise invalid(env, name, f"a whole number from {least}")
    return number


def read_index(env: Mapping[str, str], count: int | None, *names: str) -> int | None:
    """Return the index in the first variable that is set, ``None`` if none is.

    Raises:
        UsageError: If it is not a whole number below ``count``.
    """
    number = read_number(env, *names)
    if number is not None and count is not None and number >= count:
        name = next(name for name in names if env.get(name))
        raise invalid(env, name, f"less than the total of {count}")
    return number


def are_set(env: Mapping[str, str], *names: str) -> bool:
    """Return whether variables that a system sets together are set.

    Raises:
        UsageError: If only some are, for example because a container did not get the others.
    """
    missing = [name for name in names if not env.get(name)]
    if missing and len(missing) < len(names):
        given = [name for name in names if env.get(name)]
        shown = ", ".join(f"{name}={env[name][:_SHOWN]}" for name in given)
        raise UsageError(
            f"{shown} {'is' if len(given) == 1 else 'are'} set without {', '.join(missing)}",
            hint=f"unset {given[0]} if it is left over from another job; otherwise pass on all"
            " variables that the system sets",
        )
    return not missing


def invalid(env: Mapping[str, str], name: str, wanted: str) -> UsageError:
    """Return the error for a variable with an invalid value."""
    return UsageError(
        f"{name} must be {wanted}, found `{env[name][:_SHOWN]}`",
        hint=f"unset {name} if it is left over from another job",
    )


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
