"""Messages on the control sockets: encode and decode, no I/O.

One message is one JSON object in one packet, so none is ever split or joined. Nothing is
unpickled, and what does not decode raises WireError.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from meshrun.errors import InternalError
from meshrun.protocol.from_zygote import FromNegotiation, FromRank, FromZygote
from meshrun.protocol.packing import pack, unpack

PACKET_BYTES = 160 * 1024
"""Largest packet; below Linux's default socket buffer of 208 KiB."""
_LONGEST_TEXT = 16 * 1024


class WireError(InternalError):
    """A packet on a control socket is not a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Launcher to zygote, first of all: what to import, and how ranks will start."""

    start_method: str
    preload: list[str]
    """Modules that forks share; with ``exec``, those that each rank will import by itself."""
    backends: list[str]
    """Backends that torch has to know before the program's first line."""
    device: str
    """A device type to count before ranks are started; "" for none."""
    workers: int
    """As many of these devices are needed."""
    scratch_dir: str
    """Removed by the zygote if the launcher dies first; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Launcher to zygote: start one rank; its stdout and stderr come with the packet."""

    rank: int
    environment: dict[str, str]
    """Variables to set over the zygote's own."""
    unset: list[str]
    """Variables to remove."""
    coordinate: list[int]
    local_rank: int
    lazy: bool
    """Whether the mesh is left for the program's first ``current_mesh()`` to build."""
    cpus: list[int]
    """Logical CPUs to bind it to; empty for no binding."""
    imports: list[str]
    """Modules to import before the mesh is built, by a rank that is no fork."""
    label: str = ""
    """Its coordinate as people read it; "" without a mesh."""
    stdin: bool = True
    """Whether it reads the zygote's stdin; else the null device."""
    debug: bool = False
    """Whether it is the rank that is debugged, with one terminal for all its streams."""
    learn_to: str = ""
    """The file in which it says at its end what it imported; "" for none."""
    check: tuple[str, ...] = ()
    """What to check before the program: requirements as ``--require`` has them, and then folders
    that should be writable; empty for no check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStore:
    """Launcher to zygote, before a generation of ranks: serve their store.

    With the packet come the gate, a pipe that is closed at its other end once ranks that have
    finished may leave, and the listening socket, unless the store is on another node.
    """

    port: int
    """0 where the store is on another node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiate:
    """Launcher to zygote: meet the other nodes through torch's rendezvous, in a process for it."""

    backend: str
    endpoint_host: str
    endpoint_port: int
    run_id: str
    least_nodes: int
    nnodes: int
    conf: dict[str, str]
    timeout_s: float
    host: str
    """This node's name."""
    address: str
    """By which other nodes reach this one."""
    port: int
    """Where its launcher listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRanks:
    """Launcher to zygote: send a signal to ranks, or to them and all in their process groups."""

    ranks: list[int]
    signum: int
    whole_group: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRanks:
    """Launcher to zygote: it is about to be suspended, and the ranks with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRanks:
    """Launcher to zygote: it was resumed; resume the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndGeneration:
    """Launcher to zygote, after a generation: end the store and leftovers, and continue."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndZygote:
    """Launcher to zygote: no more ranks; end what is left, then exit."""

    grace_s: float


ToZygote = (
    Prepare
    | StartRank
    | StartStore
    | Negotiate
    | SignalRanks
    | SuspendRanks
    | ResumeRanks
    | EndGeneration
    | EndZygote
)
Message = ToZygote | FromZygote | FromRank | FromNegotiation

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for union in (ToZygote, FromZygote, FromRank, FromNegotiation)
    for kind in get_args(union)
}


def encode(message: Message) -> bytes:
    """Return ``message`` as one packet; texts too long for a packet lose their middle."""
    longest = _LONGEST_TEXT
    while True:
        values = {
            name: _shorten(value, longest) if isinstance(value, str) else value
            for name, value in asdict(message).items()
        }
        packet = pack(type(message), values)
        if len(packet) <= PACKET_BYTES or longest < 16:
            return packet
        longest //= 2


def decode(packet: bytes) -> Message:
    """Return the message in ``packet``.

    Raises:
        WireError: If the packet is not a message.
    """
    try:
        message: Message = unpack(packet, _TYPES)
    except ValueError as error:
        raise WireError(str(error)) from error
    return message


def _shorten(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
