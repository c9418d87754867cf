"""Numbers and JSON in variables, checked; and the task that several of them describe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshrun.cluster.cluster_facts import Task
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


class TaskPlacement(NamedTuple):
    """A task and the nodes of its job; ``None`` if unknown."""

    task: Task
    nnodes: int | None
    node_rank: int | None


def read_task(
    env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str,
    *, nnodes: int | None = None,
) -> TaskPlacement | None:  # fmt: skip
    """Return the task that four variables describe; ``None`` if none of them is set.

    ``rank`` and so on are the names of the variables; ``nnodes`` is the number of nodes, if known.

    Raises:
        UsageError: If only some are set, or they contradict each other.
    """
    if not are_set(env, rank, size, local_rank, local_size):
        return None
    world_size = read_number(env, size, least=1) or 1
    local_world_size = read_number(env, local_size, least=1) or 1
    numbers = (
        read_index(env, world_size, rank) or 0,
        read_index(env, local_world_size, local_rank) or 0,
    )
    if local_world_size > world_size:
        raise invalid(env, local_size, f"no more than {size}, which is {world_size}")
    return place_task(*numbers, world_size, local_world_size, nnodes=nnodes)


def place_task(
    rank: int, local_rank: int, world_size: int, local_world_size: int, *, nnodes: int | None
) -> TaskPlacement:
    """Return the node of a task; it follows from the rank if all nodes have as many tasks."""
    if nnodes is None and world_size % local_world_size == 0:
        nnodes = world_size // local_world_size
    is_even = nnodes is not None and nnodes * local_world_size == world_size
    in_blocks = rank % local_world_size == local_rank if is_even else True
    node_rank = 0 if nnodes == 1 else None
    if nnodes is not None and is_even:
        node_rank = rank // local_world_size if in_blocks else rank % nnodes
    task = Task(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        per_node=(local_world_size,) * nnodes if nnodes is not None and is_even else (),
        in_blocks=in_blocks,
    )
    return TaskPlacement(task, nnodes, node_rank)
