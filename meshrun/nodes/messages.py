"""What launchers tell each other, as values; JSON both ways. Pure. Times are the sender's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from meshrun.errors import MeshrunError
from meshrun.packing import pack, unpack


class MessageError(Exception):
    """A text is no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Member to head, first of all: who it is and what it is about to start."""

    host: str
    node_rank: int | None
    """Which node it was told to be, if it was."""
    nproc: int
    settings: dict[str, str]
    """What must be the same on every node, by the name of the option."""
    program: dict[str, list[str]] = field(default_factory=dict)
    """What it runs, part by part: what has to be the same, and how that is shown to people.

    Empty if the other nodes may run anything.
    """
    knock: str = ""
    """Drawn by a node 0 that knocks where another one may be, to know itself by."""
    launcher: str = ""
    """Tells this launcher from all others, so that it is known when it comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Member to head, before all have met: it will not take part."""

    host: str
    reason: str
    exit_code: int

    def as_error(self) -> MeshrunError:
        """Return what it is for the whole launch."""
        error = MeshrunError(
            f"{self.host} ended before all had joined: {self.reason}",
            hint="its own output says more",
        )
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Head to members, while nodes are missing."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Head to a member: it has no place in this launch, or the launch cannot be."""

    message: str
    hint: str | None
    exit_code: int

    @classmethod
    def of(cls, error: MeshrunError) -> Refused:
        """Return how a member is told of an error."""
        return cls(message=error.message, hint=error.hint, exit_code=error.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Head to a member: everybody is there; where nodes come and go, each time that changes."""

    node_rank: int
    hosts: list[str]
    """Host names, in node order."""
    nproc_per_node: list[int]
    run_id: str
    store_port: int
    """Where the ranks' store is, on the head."""
    causes: list[dict[str, Any]] = field(default_factory=list)
    """Why each generation of ranks before this one ended."""
    previous: dict[str, Any] = field(default_factory=dict)
    """The layout of the one before, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Both ways, about once a second: I am there."""

    at_ns: int
    echo_ns: int | None = None
    """Time of the beat that this answers, by the other end's clock."""
    idle_s: float | None = None
    """For how long no rank of the sender's has got on, if it looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Member to head: a generation of ranks is over before it is done; all are to end."""

    generation: int
    outcome: dict[str, Any]
    """What is known so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Head to members: end the ranks of this generation."""

    generation: int
    why: str
    """Which node, and what happened, for people."""
    signum: int
    is_hung: bool = False
    """Whether no rank gets on, so that people want to see where each of them is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Member to head: every program of its ranks is over, and they wait for their peers."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MayLeave:
    """Head to members: every rank's program is over."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Member to head: nothing of a generation of ranks is left here."""

    generation: int
    outcome: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Member to head, where nodes come and go: go on without this one."""

    generation: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Head to members: nothing is left anywhere; start the next generation."""

    generation: int
    cause: dict[str, Any]
    """Why the one before ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Head to members: the launch is over."""

    exit_code: int
    signum: int | None
    preempted: bool
    headline: str
    """What decided it, in one line; "" if all went well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Head to members: print where the ranks are."""

    why: str = field(default="")


Message = (
    Join | GaveUp | Waiting | Refused | Welcome | Beat | Failed | End | Finished | MayLeave | Idle
    | Leave | Begin | Over | Where
)  # fmt: skip
_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as text."""
    return pack(type(message), asdict(message))


def decode(text: bytes) -> Message:
    """Return the message in ``text``.

    Raises:
        MessageError: If it is none.
    """
    try:
        message: Message = unpack(text, _TYPES)
    except ValueError as error:
        raise MessageError(str(error)) from error
    return message
