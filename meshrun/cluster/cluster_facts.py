"""What detectors may read, and the facts that they return.

Numbers and JSON in variables are checked, and so are the several variables that describe a task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import UsageError

_PORTS = range(20000, 30000)
"""Below the ports that the kernel uses for outgoing connections (from 32768 on Linux)."""
_MOST = 2**32  # Slurm's special step ids are just below
_SHOWN = 60


def _cannot_read(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


class Surroundings(NamedTuple):
    """Everything a detector may look at."""

    env: Mapping[str, str]
    hostname: str
    """This machine's own name; a pod's includes its number."""
    terminal: bool | None = None
    """Whether this process has a controlling terminal, ``None`` if unknown.

    The tasks of a step inside an ``srun --pty`` shell inherit its variables, but have no terminal.
    """
    read: Callable[[str], str] = _cannot_read
    """Returns the text of a small file, such as a list of hosts, or raises an ``OSError``."""


class Task(Struct, frozen=True, kw_only=True):
    """This process as one of those that the system starts and numbers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    per_node: tuple[int, ...] = ()
    """Number of tasks on each node, if known."""
    in_blocks: bool = True
    """Whether the ranks of a node are consecutive, instead of going round the nodes."""


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """The position of this process among the nodes of its job; ``None`` for unknown facts."""

    system: str
    """Name for messages: ``Slurm``, ``Open MPI``, ..."""
    evidence: str
    """How it was recognized: ``step 0 of job 7 (SLURM_STEP_ID)``."""
    job_id: str | None
    """An id of this step of a job, unique at any time and the same on every node: ``7.0``."""
    nnodes: int | None
    node_rank: int | None
    hosts: tuple[str, ...] = ()
    """Names or addresses of the nodes, in node order."""
    coordinator: tuple[str, ...] = ()
    """Names or addresses at which the coordinator, node 0, may be reached, best first."""
    port: int | None = None
    """The port of node 0: the system's own, or one derived from ``job_id``."""
    task: Task | None = None
    """This process as a worker, if the system starts each worker itself."""
    secret: str | None = None
    """A secret that only the processes of this job know."""
    domain: str = ""
    """Name of the part of the network that this node shares with its nearest neighbors."""
    notes: tuple[str, ...] = ()
    """Notes about ignored variables."""
    shell: str | None = None
    """The command to use here, if this is a shell or batch script of an allocation, not a task."""
    starter: str = ""
    """The command that starts a process on one of ``hosts`` from this shell: ``ssh``, ``qrsh``."""
    step_starter: str = ""
    """The command that starts a process on every node, if the system requires it: ``srun``."""
    can_start: bool = False
    """Whether this shell has a command that starts launchers on other nodes."""
    one_a_node: str = "start one meshrun per node"
    """The command, or advice, that starts one launcher on each node."""
    more_cores: str = "widen the affinity mask"
    """How to give each worker a core; ``{workers}`` stands for their number."""
    repeats_sigterm: bool = False
    """Whether the system sends SIGTERM twice to end a process."""
    is_one_of_several: bool = False
    """Whether there are other processes, although their number is unknown."""
    variables: tuple[tuple[str, str], ...] = ()
    """The variables that were read and are set, with their values."""

    def __repr__(self) -> str:
        return Struct.__repr__(replace(self, secret=None, variables=()))  # may be secret


def derive_port(job_id: str) -> int:
    """Return a port for a job, the same on every node."""
    from hashlib import sha256

    digest = sha256(job_id.encode(errors="surrogateescape")).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def facts_of_node(
    system: str,
    evidence: str,
    job_id: str | None,
    node_rank: int | None,
    nnodes: int | None = None,
    *,
    hosts: tuple[str, ...] = (),
    coordinator: Iterable[str | None] | None = None,
    port: int | None = None,
) -> ClusterFacts:
    """Return the facts of a node, or of a task on it, with a port if the job has an id.

    ``nnodes`` is by default the number of ``hosts``, if any, and ``coordinator`` the first of them;
    names and addresses in it that are empty are left out. ``port`` is the system's own one, if any.
    """
    return ClusterFacts(
        system=system,
        evidence=evidence,
        job_id=job_id,
        nnodes=nnodes or len(hosts) or None,
        node_rank=node_rank,
        hosts=hosts,
        coordinator=hosts[:1] if coordinator is None else tuple(filter(None, coordinator)),
        port=port or (derive_port(job_id) if job_id else None),
    )


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
