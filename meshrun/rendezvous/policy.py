"""What differs between a launch with a fixed number of nodes and an elastic one. Pure.

Other modules ask only for numbers: how many nodes are enough (``least_nodes``), and how long to
wait for more once they have joined (``last_call_s``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from meshrun.plan import rendezvous_options
from meshrun.protocol.events import GenerationAborted, NodeLost
from meshrun.rendezvous.membership import Membership
from meshrun.rendezvous.messages import Join
from meshrun.rendezvous.node_phases import ParticipantPhase


class Policy(Struct, frozen=True, kw_only=True):
    """What the launchers do as nodes join and are lost: :data:`FIXED` or :data:`ELASTIC`."""

    needs_all: bool
    """Whether the launch needs every one of its nodes from the start, not only node 0."""
    tests_reach: bool
    """Whether the nodes test that they reach each other."""
    check_place: Callable[[Membership, Join], None]
    """Raises a UsageError if a node may not join a launch that has begun."""
    replaceable: Callable[[Membership, str], Collection[int]]
    """Returns the nodes that a new launcher on a host may replace, if they are silent."""
    event_of_loss: Callable[[NodeLost, bool], NodeLost | GenerationAborted | None]
    """Returns the event by which a lost node ends the generation on node 0, or ``None`` if it does
    not; the second argument is whether every program has finished."""
    announces_changes: bool
    """Whether a note says how the nodes of a generation differ from those of the last one."""
    wait_option: str
    """The option that sets how long to wait for missing nodes."""
    if_no_place: Mapping[ParticipantPhase, ParticipantPhase]
    """How a node continues that has joined, but that no generation needs yet."""
    if_lost: Mapping[ParticipantPhase, ParticipantPhase]
    """How a node continues that has lost node 0."""
    committed: Collection[ParticipantPhase]
    """The phases in which node 0 does not reject a node any more."""


def change_of_nodes(why: str, at_ns: int) -> GenerationAborted:
    """Return the event that the generation ends on node 0, as the next one has other nodes."""
    return GenerationAborted(why=why, signum=0, at_ns=at_ns, resizes=True)


def _change_by_loss(lost: NodeLost, has_finished: bool) -> GenerationAborted | None:
    return None if has_finished else change_of_nodes(str(lost), lost.at_ns)


FIXED = Policy(
    needs_all=True,
    tests_reach=True,
    check_place=Membership.check_place,
    replaceable=Membership.on_host,
    event_of_loss=lambda lost, _: lost,
    announces_changes=False,
    wait_option="--node-timeout TIME",
    if_no_place={},
    if_lost={
        ParticipantPhase.RUNNING: ParticipantPhase.OVER,
        ParticipantPhase.CLEARED: ParticipantPhase.OVER,
    },
    committed=(ParticipantPhase.RUNNING, ParticipantPhase.CLEARED),
)
"""All nodes take part. A lost one ends the launch, unless a restart is left and it returns."""

ELASTIC = Policy(
    needs_all=False,
    tests_reach=False,
    check_place=lambda *_: None,  # without a place, it is a spare
    replaceable=lambda *_: (),  # containers may share the name of a host
    event_of_loss=_change_by_loss,
    announces_changes=True,
    wait_option=f"{rendezvous_options.FLAG} {rendezvous_options.JOIN.names[0]}=TIME",
    if_no_place={
        ParticipantPhase.JOINING: ParticipantPhase.SPARE,
        ParticipantPhase.RETURNING: ParticipantPhase.SPARE,
    },
    if_lost={
        ParticipantPhase.RUNNING: ParticipantPhase.CUT_OFF,
        ParticipantPhase.CLEARED: ParticipantPhase.RETURNING,
        ParticipantPhase.SPARE: ParticipantPhase.RETURNING,
    },
    committed=(ParticipantPhase.RUNNING,),
)
"""Nodes join and leave: each change ends the generation, and the next one has other nodes."""
