"""What differs between a fixed and an elastic number of nodes."""

from __future__ import annotations

import pytest

from meshrun.errors import UsageError
from meshrun.protocol.events import NodeLost
from meshrun.rendezvous.membership import Membership, fit_without_mesh
from meshrun.rendezvous.node_phases import ParticipantPhase
from meshrun.rendezvous.policy import ELASTIC, FIXED, Policy, change_of_nodes
from tests.diagrams import FOLLOWS
from tests.kit import HUNG_UP, all_running, lost_node
from tests.parties import info

LOST = NodeLost(node_rank=1, host="node1", why=HUNG_UP, at_ns=7, heard_ns=5)
CHANGE = change_of_nodes(f"{lost_node(1)}{HUNG_UP}", 7)
BOTH = pytest.mark.parametrize("policy", [FIXED, ELASTIC], ids=["fixed", "elastic"])


@pytest.mark.parametrize(
    ("policy", "has_finished", "event"),
    [
        (FIXED, False, LOST),
        (FIXED, True, LOST),
        (ELASTIC, False, CHANGE),
        (ELASTIC, True, None),
    ],
    ids=["fixed", "fixed, finished", "elastic", "elastic, finished"],
)
def test_what_a_lost_node_means(policy: Policy, has_finished: bool, event: object) -> None:
    """An elastic launch goes on without it, and needs it no more once all programs have ended."""
    assert policy.event_of_loss(LOST, has_finished) == event


@BOTH
def test_who_may_join_a_running_launch(policy: Policy) -> None:
    """With a fixed number of nodes, only one in place of another."""
    infos = {number: info(f"node{number}") for number in range(2)}
    nodes = Membership(fit=fit_without_mesh, least=2, most=2, infos=infos)
    if policy is FIXED:
        with pytest.raises(UsageError, match=all_running("node0", "node1")):
            policy.check_place(nodes, info("node2"))
        nodes.remove(1)
    policy.check_place(nodes, info("node2"))

    assert list(policy.replaceable(nodes, "node0")) == ([0] if policy is FIXED else [])


@BOTH
def test_a_participant_goes_on_as_the_diagram_says(policy: Policy) -> None:
    """If there is no place for it, and if it has lost node 0."""
    arrows = [*policy.if_no_place.items(), *policy.if_lost.items()]

    assert [
        after for before, after in arrows if after not in FOLLOWS[ParticipantPhase][before]
    ] == []
