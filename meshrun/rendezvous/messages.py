"""The messages between launchers, as values and as JSON. Pure.

Annotations say which values are valid. Decoding validates them, sanitizes texts for display, and
converts times to the receiver's clock, so that no other code has to.
"""

from __future__ import annotations

import base64
import json
import zlib
from itertools import chain
from typing import Annotated

from msgspec import Meta, Struct

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.host.printable import lines, one_line
from meshrun.layout import MAX_RANKS, Layout
from meshrun.protocol.collectives import AskTimes, RankTimes
from meshrun.protocol.events import (
    AllJoined,
    GenerationAborted,
    LaunchOver,
    NextBegins,
    NodeAssignment,
    OthersFinished,
    ShowStacks,
)
from meshrun.protocol.generation import NodeOutcome, Trouble, Withdraw
from meshrun.protocol.packing import (
    ClockTime,
    Generation,
    Line,
    Rank,
    pack,
    pack_fields,
    to_builtins,
    unpack,
)
from meshrun.rendezvous.frames import LONGEST
from meshrun.wording import count

_LONGEST_DRAWN = 64
"""The most characters of a run id that a coordinator may have generated."""
NodeRank = Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
OpenPort = Annotated[int, Meta(ge=0, le=65_535)]
"""A port, or 0 for none."""
Received = Annotated[int, Meta(ge=0, le=2**62)]
"""How many messages the sender has received on this connection, apart from heartbeats."""


class MessageError(Exception):
    """A text is not a message."""


class Join(Struct, frozen=True, kw_only=True):
    """Participant to coordinator, first: which node it is, and what it is about to start."""

    host: Line
    node_rank: NodeRank | None
    """The value of ``--node-rank``, if given."""
    nproc: Count
    settings: dict[str, str]
    """Settings that must be the same on every node, by the name of the option."""
    program: dict[str, list[str]] = {}
    """The program, part by part: a value to compare, and how to display it.

    Empty if the other nodes may run anything.
    """
    reach_port: OpenPort = 0
    """The port on which another node may test whether it reaches this one."""
    probe: str = ""
    """A random text by which a node 0 that probes the endpoint recognizes itself."""
    role: str = "default"
    """The value of ``--role``."""
    domain: Line = ""
    """The name of its NVLink domain, if that matters and is known."""
    launcher: str = ""
    """An id by which a launcher is recognized when it reconnects."""
    addresses: list[Line] = []
    """The IPv6 addresses of its machine; its connections may come from any of them."""


class Resume(Struct, frozen=True, kw_only=True):
    """Participant to coordinator, first, after its connection was reset: continue on this one."""

    launcher: str
    received: Received


class Resumed(Struct, frozen=True, kw_only=True):
    """The answer to that."""

    received: Received


class Waiting(Struct, frozen=True, kw_only=True):
    """To participants: the launch waits for nodes, or this node is a spare."""

    text: Line
    has_begun: bool = False
    """Whether the launch has begun, so that this node takes part once it is needed."""


class Rejected(Trouble, frozen=True):
    """To a participant: it has no place in this launch, or the launch has failed."""


class Welcome(NodeAssignment, frozen=True, kw_only=True):
    """To a participant: all nodes have joined, or the nodes of an elastic launch have changed."""

    next_address: str = ""
    """The address of the next node, to test whether it can be reached; "" for the coordinator's."""
    next_port: OpenPort = 0
    """The open port of the next node."""

    def __post_init__(self) -> None:
        nodes, ranks = len(self.hosts), sum(self.nproc_per_node)
        counts = {len(self.nproc_per_node), len(self.roles or self.hosts)}
        if not self.node_rank < nodes or counts != {nodes} or ranks > MAX_RANKS:
            raise ValueError(f"node {self.node_rank} of {nodes}, {ranks} ranks")
        if (domains := self.nodes_per_domain) and (sum(domains) != nodes or 0 in domains):
            raise ValueError(f"{len(domains)} domains of {sum(domains)} nodes, not {nodes}")
        try:
            previous = Layout.from_dict(self.previous).world_size if self.previous else 0
        except MeshrunError as error:
            raise ValueError(error.message) from error
        if previous > MAX_RANKS:
            raise ValueError(f"a layout of {previous} ranks")

    def joined(self, *, store_address: str, own_address: str, at_ns: int) -> AllJoined:
        """Return the event for this node's launch.

        Args:
            store_address: The address at which this node reaches the coordinator.
            own_address: The address at which the coordinator reaches this node.
            at_ns: The time.
        """
        return AllJoined(
            **{name: getattr(self, name) for name in NodeAssignment.__struct_fields__},
            store_address=store_address,
            own_address=own_address,
            at_ns=at_ns,
        )

    def check(self, info: Join, run_id: str | None) -> None:
        """Check that this is for the node that sent ``info``.

        Raises:
            RendezvousError: If it is for another node, or of another launch.
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


class Beat(Struct, frozen=True, kw_only=True):
    """A heartbeat, in both directions, about once a second."""

    at_ns: ClockTime
    echo_ns: ClockTime | None = None
    """The time of the heartbeat that this answers, by the peer's clock."""
    idle_s: Annotated[float, Meta(ge=0, le=10**9)] | None = None
    """How long no rank of the sender has made progress, if it measures that."""
    received: Received = 0


class _WithOutcome(Struct, frozen=True, kw_only=True):
    generation: Generation
    outcome: NodeOutcome
    """The node's report so far."""

    @property
    def last_rank(self) -> int:
        """The highest rank in it; -1 for none."""
        outcome = self.outcome
        return max((*outcome.ranks, *outcome.evidence, *outcome.calls), default=-1)


class Failed(_WithOutcome, frozen=True):
    """Participant to coordinator: a generation failed here, so all ranks must stop."""


class Disconnect(Struct, frozen=True, kw_only=True):
    """In both directions, before a connection is closed: why the sender drops the peer."""

    why: Line


class Finished(Struct, frozen=True, kw_only=True):
    """Participant to coordinator: its ranks have finished, and wait for their peers."""

    generation: Generation


class Cleared(_WithOutcome, frozen=True):
    """Participant to coordinator: nothing of a generation is left here."""


class Leave(Struct, frozen=True, kw_only=True):
    """Participant to coordinator, in an elastic launch: continue without this node."""

    generation: Generation
    why: Line


class Times(Struct, frozen=True, kw_only=True):
    """Participant to coordinator: its ranks' answers, by its monotonic clock."""

    generation: Generation
    answers: list[RankTimes]
    why: dict[Rank, Line] = {}
    """What delays its late ranks, as far as it can tell."""

    @property
    def last_rank(self) -> int:
        """The highest rank in it; -1 for none."""
        groups = (group.ranks for answer in self.answers for group in answer.groups)
        ranks = (answer.rank for answer in self.answers)
        return max((*ranks, *chain(*groups), *self.why), default=-1)


Decision = GenerationAborted | OthersFinished | NextBegins | LaunchOver
"""To participants: what happens next, as an event of their own launches."""
Message = (
    Join | Resume | Resumed | Withdraw | Waiting | Rejected | Welcome | Beat | Disconnect
    | Failed | Finished | Cleared
    | Leave | Decision | ShowStacks | AskTimes | Times
)  # fmt: skip
_OF_ONE_NODE = ("node_rank", "next_address", "next_port")
"""The fields of a Welcome that differ between nodes."""
_SHARED = b'["Welcome", {"shared"'


def encode(message: Message) -> bytes:
    """Return a message as text."""
    return pack(message)


class SharedWelcome:
    """The fields of a Welcome that are the same for all nodes, encoded once and compressed.

    Otherwise, the 10,000 messages to 10,000 nodes, each with all host names, would take 2 GB.
    """

    def __init__(self, welcome: Welcome) -> None:
        values = to_builtins(welcome)
        shared = json.dumps({name: values[name] for name in values if name not in _OF_ONE_NODE})
        self._text = base64.b64encode(zlib.compress(shared.encode())).decode()

    def encode(self, node_rank: int, next_address: str, next_port: int) -> bytes:
        """Return the Welcome for one node as text."""
        own = (node_rank, next_address, next_port)
        values = dict(zip(_OF_ONE_NODE, own, strict=True))
        return pack_fields(Welcome, {"shared": self._text, **values})


def decode(text: bytes, ahead_ns: int = 0) -> Message:
    """Return the message in ``text``, whose sender's clock is ``ahead_ns`` ahead of ours.

    Raises:
        MessageError: If it is not a message.
    """
    try:
        if text.startswith(_SHARED):
            text = _with_shared(text)
        message: Message = unpack(text, Message, sanitize=lines, ahead_ns=ahead_ns)
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
