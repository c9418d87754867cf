"""The messages between launchers, as values, and as JSON. Pure. Times are the sender's.

What comes is checked and made fit to be shown as it is decoded, so nothing else has to look again
at what another machine said: annotations say what a value may be.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Annotated, Any, get_args

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.layout import MAX_RANKS, Layout
from meshrun.protocol.checked import ExitCode, Line, Rank, Signum, Time
from meshrun.protocol.collectives import RankTimes
from meshrun.protocol.events import Met
from meshrun.protocol.from_zygote import GaveUp
from meshrun.protocol.generation import Cause, NodeOutcome, Trouble
from meshrun.protocol.packing import Within, pack, unpack
from meshrun.protocol.printable import lines, one_line
from meshrun.rendezvous.frames import LONGEST
from meshrun.wording import count


def _layout(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a layout, or none at all."""
    try:
        ranks = Layout.from_dict(values).world_size if values else 0
    except MeshrunError as error:
        raise ValueError(error.message) from error
    if ranks > MAX_RANKS:
        raise ValueError(f"a layout of {ranks} ranks")
    return values


_LONGEST_DRAWN = 64
"""The most characters of a run id that a coordinator may have drawn."""
Generation = Annotated[int, Within(0, 2**31)]
NodeRank = Annotated[int, Within(0, MAX_RANKS - 1)]
Workers = Annotated[int, Within(0, MAX_RANKS)]
Port = Annotated[int, Within(1, 65_535)]
OpenPort = Annotated[int, Within(0, 65_535)]
"""A port, or 0 for none."""


class MessageError(Exception):
    """A text is no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Participant to coordinator, first: who it is and what it is about to start."""

    host: Line
    node_rank: NodeRank | None
    """Which node it was told to be, if it was."""
    nproc: Workers
    settings: dict[str, str]
    """What must be the same on every node, by the name of the option."""
    program: dict[str, list[str]] = field(default_factory=dict)
    """What it runs, part by part: what has to be the same, and how that is shown to people.

    Empty if the other nodes may run anything.
    """
    reach_port: OpenPort = 0
    """Where another node may try whether it reaches this one."""
    probe: str = ""
    """Random, by which a node 0 that probes the endpoint recognizes itself."""
    role: str = "default"
    """What ``--role`` calls its workers."""
    domain: Line = ""
    """What its NVLink domain is called, where that matters and it knows."""
    launcher: str = ""
    """Tells this launcher from all others, so that it is known when it comes again."""
    addresses: list[Line] = field(default_factory=list)
    """IPv6 addresses of its machine: which one a connection comes from may differ and change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """To participants, while nodes are missing."""

    text: Line
    has_begun: bool = False
    """Whether nodes have met before, and this one takes part once there is need of it."""


class Refused(Trouble):
    """To a participant: it has no place in this launch, or the launch cannot be."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """To a participant: all nodes are there; in an elastic launch, whenever that changes."""

    node_rank: NodeRank
    hosts: list[Line]
    """Host names, in node order."""
    nproc_per_node: list[Workers]
    nodes_per_domain: list[Workers] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    """What each node calls its workers, in node order."""
    run_id: str
    store_port: Port
    """Where the ranks' store is, on the coordinator."""
    next_address: str = ""
    """Address of the next node, to check that it can be reached; "" for the coordinator's."""
    next_port: OpenPort = 0
    """Which port is open there, if any."""
    causes: list[Cause] = field(default_factory=list)
    """Why each generation of ranks before this one ended."""
    previous: Annotated[dict[str, Any], _layout] = field(default_factory=dict)
    """The layout of the one before, if there was one."""

    def __post_init__(self) -> None:
        nodes, ranks = len(self.hosts), sum(self.nproc_per_node)
        counts = {len(self.nproc_per_node), len(self.roles or self.hosts)}
        if not self.node_rank < nodes or counts != {nodes} or ranks > MAX_RANKS:
            raise ValueError(f"node {self.node_rank} of {nodes}, {ranks} ranks")
        if (domains := self.nodes_per_domain) and (sum(domains) != nodes or 0 in domains):
            raise ValueError(f"{len(domains)} domains of {sum(domains)} nodes, not {nodes}")

    def met(self, *, store_address: str, own_address: str, ahead_ns: int = 0) -> Met:
        """Return the news for this node's launch.

        Args:
            store_address: Of the coordinator, as this node reaches it.
            own_address: Of this node, as the coordinator reaches it.
            ahead_ns: How far the coordinator's clock is ahead of this node's.
        """
        return Met(
            node_rank=self.node_rank,
            hosts=tuple(self.hosts),
            nproc_per_node=tuple(self.nproc_per_node),
            nodes_per_domain=tuple(self.nodes_per_domain),
            roles=tuple(self.roles),
            run_id=self.run_id,
            store_address=store_address,
            store_port=self.store_port,
            own_address=own_address,
            at_ns=time.monotonic_ns(),
            causes=tuple(cause.shifted(-ahead_ns) for cause in self.causes),
            previous=self.previous or None,
        )

    def check(self, info: Join, run_id: str | None) -> None:
        """Check that it is for the node that sent ``info``.

        Raises:
            RendezvousError: If it is for another, or would have this one do what nobody asked for.
        """
        own = (info.host, info.nproc)
        found = (self.hosts[self.node_rank], self.nproc_per_node[self.node_rank])
        name = lines(run_id) if run_id else self.run_id[:_LONGEST_DRAWN]
        if self.node_rank == 0 or found != own or self.run_id != name:
            raise RendezvousError(
                f"node 0 ({self.hosts[0]}) expects node {self.node_rank} to be {found[0]} with"
                f" {count(found[1], 'worker')} of launch {one_line(self.run_id, 80)}, but this is"
                f" {own[0]} with {count(own[1], 'worker')}",
                hint="another launch may use this endpoint; set a MESHRUN_SECRET for each launch",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Both ways, about once a second: I am there."""

    at_ns: Time
    echo_ns: Time | None = None
    """Time of the beat that this answers, by the other end's clock."""
    idle_s: Annotated[float, Within(0, 10**9)] | None = None
    """For how long no rank of the sender has made progress, if it measures that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithOutcome:
    generation: Generation
    outcome: NodeOutcome
    """What is known so far."""

    @property
    def last_rank(self) -> int:
        """The highest rank it tells of; -1 for none."""
        outcome = self.outcome
        return max((*outcome.ranks, *outcome.evidence, *outcome.calls), default=-1)


class Failed(_WithOutcome):
    """Participant to coordinator: a generation failed; all ranks are to stop."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Both ways, before a connection is closed: why this end gives the other one up."""

    why: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """To participants: end the ranks of this generation."""

    generation: Generation
    why: Line
    """Which node, and what happened, as text."""
    signum: Signum
    is_hung: bool = False
    """Whether no rank makes progress, so that the stacks of all are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Participant to coordinator: its ranks finished, and wait for their peers."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class MayLeave:
    """To participants: every rank's program has ended."""

    generation: Generation


class Idle(_WithOutcome):
    """Participant to coordinator: nothing of a generation is left here."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Participant to coordinator, in an elastic launch: continue without this node."""

    generation: Generation
    why: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """To participants: nothing is left anywhere; start the next generation."""

    generation: Generation
    cause: Cause
    """Why the one before ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """To participants: the launch has ended."""

    exit_code: ExitCode
    signum: Signum | None
    preempted: bool
    headline: Line
    """What decided it, in one line; "" if all went well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """To participants: print where the ranks are."""

    why: Line = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTimes:
    """To participants: when have ranks begun their last collectives?"""

    generation: Generation
    late: list[Rank] = field(default_factory=list)
    """Ranks of any node that were late when last asked: what holds them up?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Participant to coordinator: its ranks' answers, by its monotonic clock."""

    generation: Generation
    answers: list[RankTimes]
    why: dict[Rank, Line] = field(default_factory=dict)
    """What holds up those of its ranks that are late, as far as can be seen."""

    @property
    def last_rank(self) -> int:
        """The highest rank it tells of; -1 for none."""
        groups = (group.ranks for answer in self.answers for group in answer.groups)
        ranks = (answer.rank for answer in self.answers)
        return max((*ranks, *chain(*groups), *self.why), default=-1)


Message = (
    Join | GaveUp | Waiting | Refused | Welcome | Beat | Parting | Failed | End | Finished
    | MayLeave | Idle | Leave | Begin | Over | Where | AskTimes | Times
)  # fmt: skip
_OF_ONE_NODE = ("node_rank", "next_address", "next_port")
"""What differs between the nodes that are welcomed."""
_SHARED = b'["Welcome", {"shared"'
_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as text."""
    if isinstance(message, Welcome):
        return SharedWelcome(message).encode(
            message.node_rank, message.next_address, message.next_port
        )
    if isinstance(message, Beat):  # thousands a second; a third of the time of asdict()
        values = {"at_ns": message.at_ns, "echo_ns": message.echo_ns, "idle_s": message.idle_s}
        return pack(Beat, values)
    return pack(type(message), asdict(message))


class SharedWelcome:
    """What all nodes are told alike when they have met: encoded once, and compressed.

    A launch of 10,000 nodes has as many of these messages, each with all names: 2 GB otherwise.
    """

    def __init__(self, welcome: Welcome) -> None:
        values = asdict(welcome)
        shared = json.dumps({name: values[name] for name in values if name not in _OF_ONE_NODE})
        self._text = base64.b64encode(zlib.compress(shared.encode())).decode()

    def encode(self, node_rank: int, next_address: str, next_port: int) -> bytes:
        """Return the message to one node as text."""
        own = (node_rank, next_address, next_port)
        values = dict(zip(_OF_ONE_NODE, own, strict=True))
        return pack(Welcome, {"shared": self._text, **values})


def decode(text: bytes) -> Message:
    """Return the message in ``text``.

    Raises:
        MessageError: If it is none.
    """
    try:
        if text.startswith(_SHARED):
            text = _with_shared(text)
        message: Message = unpack(text, _TYPES, lines)
    except ValueError as error:
        raise MessageError(str(error)) from error
    return message


def _with_shared(text: bytes) -> bytes:
    try:
        name, values = json.loads(text)
        packed = base64.b64decode(values.pop("shared"), validate=True)
        unpacker = zlib.decompressobj()
        shared = json.loads(unpacker.decompress(packed, LONGEST))
        return json.dumps([name, {**shared, **values}]).encode()
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error, RecursionError) as error:
        raise ValueError(f"not a message: {text[:80]!r}") from error
