"""Messages between a launcher and a warm server, as values."""

from __future__ import annotations

from msgspec import Struct

from meshrun.plan.rank_program import Program
from meshrun.warm.identity import Requirements
from meshrun.warm.inherited import Inherited

FDS = 8
"""The spec in memory, the working folder, stdin, stdout, stderr, control, reports and stacks."""


class ServerSpec(Struct, frozen=True, kw_only=True):
    """From a launcher to a new server, in a file whose descriptor is on its command line."""

    folder: str
    """The folder of the servers."""
    required: Requirements
    """What the next run will require; modules that do not exist are left out."""
    unfit: str
    """The file to which to write why forks with these modules cannot run the program."""
    idle_s: float
    session: int
    """The leader of the login session; 0 if there is none."""


class ZygoteSpec(Struct, frozen=True, kw_only=True):
    """From a launcher to a server, in a file: fork such a zygote."""

    program: Program
    mark: str
    """Identifies leftovers of the launch."""
    inherited: Inherited


class ZygoteForked(Struct, frozen=True, kw_only=True):
    """From the shim to the launcher: the zygote runs; pidfds of it and the shim come along."""

    pid: int


class ZygoteEnded(Struct, frozen=True, kw_only=True):
    """From the shim to the launcher: the zygote has ended, and only these are left."""

    wait_status: int
    survivors: list[int]
    """Processes that the kernel holds."""
    denied: list[int]
    """Processes that have become another user's."""
