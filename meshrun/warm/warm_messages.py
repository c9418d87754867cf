"""What a launcher and a warm server say to each other; no I/O. What does not decode is refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from meshrun.plan.rank_program import ProgramKind
from meshrun.protocol.packing import pack, unpack
from meshrun.warm.inherited import Inherited

FDS = 8
"""A text in memory, then working folder, stdin, stdout, stderr, control, reports, stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Launcher to server, first on the command line of a server and then in its own file."""

    place: str
    """The folder in which it is to be found."""
    modules: list[str]
    """What to import, as far as it is there."""
    own_files: list[str]
    """The program's own, as it last ran."""
    changed: list[str]
    """Variables that the program set while it ran."""
    refused: str
    """The file in which to say why forks of what it imports would not be right for it."""
    environment: dict[str, str]
    idle_s: float
    session: int
    """A process that leads the login session; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartZygote:
    """Launcher to server: fork a zygote; the text that comes with it is a :class:`Charge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a zygote is to be, which may be longer than a packet."""

    kind: ProgramKind
    target: str
    args: list[str]
    mark: str
    """By which leftovers of the launch are found."""
    inherited: Inherited


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteForked:
    """Keeper to launcher: it runs; descriptors of it and of the keeper come with the packet."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnded:
    """Keeper to launcher: it has ended, and nothing of it is left but these."""

    wait_status: int
    survivors: list[int]
    """Processes that the kernel holds."""
    denied: list[int]
    """Processes that have become another user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Launcher to keeper: it lives, and sees to what is left itself."""


Message = Assignment | StartZygote | Charge | ZygoteForked | ZygoteEnded | Dismiss
_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as text."""
    return pack(type(message), asdict(message))


def decode(text: bytes) -> Message:
    """Return the message in a text.

    Raises:
        ValueError: If it is none.
    """
    message: Message = unpack(text, _TYPES)
    return message
