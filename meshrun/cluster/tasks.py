"""The node of one of several processes that a system started, as far as their counts show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshrun.cluster.cluster_facts import Task
from meshrun.cluster.read_variables import are_set, invalid, read_index, read_number


class Placed(NamedTuple):
    """A task and the nodes of its job; ``None`` if unknown."""

    task: Task
    nnodes: int | None
    node_rank: int | None


def read_task(
    env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str,
    *, nnodes: int | None = None,
) -> Placed | None:  # fmt: skip
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
) -> Placed:
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
    return Placed(task, nnodes, node_rank)
