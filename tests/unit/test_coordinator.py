"""Node 0 once all nodes have joined: what it sends to the others, and when."""

from __future__ import annotations

import pytest

from meshrun.protocol.events import (
    AllCleared,
    AllJoined,
    GenerationAborted,
    LaunchOver,
    NextBegins,
    NodeLost,
    OthersFinished,
    ShowStacks,
)
from meshrun.protocol.generation import NodeOutcome, RankState, Withdraw
from meshrun.protocol.rank_end import RankRaised
from meshrun.rendezvous import connection
from meshrun.rendezvous.messages import Cleared, Failed, Finished
from meshrun.rendezvous.node_phases import CoordinatorPhase
from meshrun.rendezvous.participant import Participant
from tests.diagrams import unseen
from tests.kit import HUNG_UP, SILENT, lost_node
from tests.parties import WHY, Parties, Party, info, names

OVER = LaunchOver(
    exit_code=7, signum=None, preempted=False, headline="rank 1 failed", generation=0, at_ns=0
)
TIMED_OUT = RankRaised(
    rank=1, at_ns=0, kind="RuntimeError", message="[/gloo/transport/tcp/b.cc:1] Timed out",
    traceback="", shown=False,
)  # fmt: skip


@pytest.fixture
def three(parties: Parties) -> list[Party]:
    """A coordinator and two participants that have joined, with their events so far removed."""
    joined = [
        parties.coordinator(3),
        *(parties.participant(info(f"node{n}", n), nnodes=3) for n in (1, 2)),
    ]
    parties.until(lambda: all(party.received(AllJoined) for party in joined))
    for party in joined:
        party.events.clear()
    return joined


def failed(headline: str = "rank 1 failed", signum: int = 0, generation: int = 0) -> Failed:
    return Failed(generation=generation, outcome=NodeOutcome(headline=headline, signum=signum))


def cleared(generation: int = 0, headline: str = "") -> Cleared:
    return Cleared(generation=generation, outcome=NodeOutcome(headline=headline))


def settled(parties: Parties) -> None:
    """Let time pass for messages to arrive, including any that should not."""
    parties.pass_s(5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_ends_the_others(parties: Parties, three: list[Party], number: int) -> None:
    """Once, with its cause and signal, but not the node that reported it."""
    three[number].send(failed(signum=15))
    others = [party for party in three if party is not three[number]]
    parties.until(lambda: all(party.received(GenerationAborted) for party in others))
    three[3 - number - 1].send(failed("another"))
    settled(parties)

    news = [party.received(GenerationAborted) for party in three]
    assert [len(each) for each in news] == [int(party in others) for party in three]
    assert {(each[0].why, each[0].signum) for each in news if each} == {("rank 1 failed", 15)}


@pytest.mark.parametrize(
    ("outcome", "title"),
    [
        (NodeOutcome(headline="no progress for 3 s: rank 1 is elsewhere", is_hung=True), "no prog"),
        (NodeOutcome(ranks={1: RankState(raised=TIMED_OUT)}), "a collective timed out: showing "),
        (NodeOutcome(headline="rank 1 failed"), ""),
    ],
)
def test_all_nodes_show_their_ranks_if_ranks_wait_for_each_other(
    parties: Parties, three: list[Party], outcome: NodeOutcome, title: str
) -> None:
    three[1].send(Failed(generation=0, outcome=outcome))
    parties.until(lambda: all(party.received(GenerationAborted) for party in three[::2]))
    titles = [each.title for party in three for each in party.received(GenerationAborted)]

    assert [bool(found) for found in titles] == [bool(title)] * 2
    assert all(found.startswith(title) for found in titles)


def test_a_failure_of_an_earlier_generation_is_ignored(
    parties: Parties, three: list[Party]
) -> None:
    """The report was sent before the order to restart arrived."""
    for party in three:
        party.send(cleared())
    parties.until(lambda: three[0].received(AllCleared))
    three[0].send(NextBegins(generation=1, cause=WHY, at_ns=0))
    parties.until(lambda: all(party.received(NextBegins) for party in three))
    three[1].send(failed(generation=0))
    settled(parties)
    assert not three[2].received(GenerationAborted)
    three[1].send(failed(generation=1))

    parties.until(
        lambda: three[2].received(GenerationAborted) and three[0].received(GenerationAborted)
    )


def test_all_may_leave_once_all_have_finished(parties: Parties, three: list[Party]) -> None:
    """Whichever node is the last."""
    for party in (three[2], three[0]):
        party.send(Finished(generation=0))
    settled(parties)
    assert names(three) == [[], [], []]
    three[1].send(Finished(generation=0))
    parties.until(lambda: all(party.received(OthersFinished) for party in three))

    assert [len(party.events) for party in three] == [1, 1, 1]


def test_cleared_nodes_are_reported_to_the_coordinator_once(
    parties: Parties, three: list[Party]
) -> None:
    """With each of the other nodes' outcomes."""
    for number in (1, 2):
        three[number].send(cleared(headline=f"node{number}"))
    settled(parties)
    assert names(three) == [[], [], []]
    three[0].send(cleared(headline="node0"))
    parties.until(lambda: three[0].events)

    assert len(three[0].received(AllCleared)) == 1
    assert [each.headline for each in three[0].received(AllCleared)[0].outcomes] == [
        "node1",
        "node2",
    ]


def test_the_end_is_sent_to_all(
    parties: Parties, three: list[Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that leaves after that is not lost."""
    monkeypatch.setattr(connection, "_GOODBYE_S", 0.1)  # it waits for others, which do not close
    three[0].send(OVER)
    parties.until(lambda: all(party.received(LaunchOver) for party in three))
    parties.remove(three[1])
    parties.remove(three[0])
    settled(parties)

    over = three[2].received(LaunchOver)[0]
    assert (over.exit_code, over.headline) == (7, "rank 1 failed")
    assert not any(party.received(NodeLost) for party in three)


def test_a_node_that_leaves_ends_the_others(parties: Parties, three: list[Party]) -> None:
    """They learn which node it was, and the coordinator does not wait for it to be cleared."""
    parties.remove(three[1])
    parties.until(lambda: three[0].received(NodeLost) and three[2].received(GenerationAborted))
    three[0].send(cleared())
    three[2].send(cleared())
    parties.until(lambda: three[0].received(AllCleared))

    lost = three[0].received(NodeLost)[0]
    assert (lost.node_rank, lost.host, lost.why) == (1, "node1", HUNG_UP)
    assert three[2].received(GenerationAborted)[0].why == f"{lost_node(1)}{HUNG_UP}"


def test_a_node_that_has_withdrawn_before_it_was_welcomed(
    parties: Parties, three: list[Party]
) -> None:
    """The others learn why; its message has crossed that it takes part."""
    notice = Withdraw(host="node1", reason="it was stopped by SIGTERM", exit_code=143)
    side = three[1].side
    assert isinstance(side, Participant)
    side.withdraw(notice)
    parties.until(lambda: three[0].received(NodeLost) and three[2].received(GenerationAborted))

    assert three[0].received(NodeLost)[0].why == "it was stopped by SIGTERM"
    assert three[2].received(GenerationAborted)[0].why == (
        f"{lost_node(1)}it was stopped by SIGTERM"
    )


def test_a_node_that_falls_silent_is_lost(parties: Parties, three: list[Party]) -> None:
    """After the default timeout of 30 s."""
    silent = three[2]
    parties.all.remove(silent)
    parties.pass_s(28)
    assert not three[0].events
    parties.pass_s(5)

    assert three[0].received(NodeLost)[0].host == "node2"
    assert not three[1].received(NodeLost)
    silent.close()


def test_the_others_are_asked_where_they_are(parties: Parties, three: list[Party]) -> None:
    """With the reason, which users see."""
    three[0].send(ShowStacks(why="SIGQUIT on node0"))
    parties.until(lambda: three[1].asked and three[2].asked)

    assert three[1].asked == ["SIGQUIT on node0"]


@pytest.mark.parametrize("silenced", [0, 1], ids=["coordinator", "participant"])
def test_a_node_that_is_given_up_learns_why(parties: Parties, silenced: int) -> None:
    """Both sides report the silence, and not that the other one closed the connection."""
    joined = [parties.coordinator(2), parties.participant(info("node1", 1))]
    parties.until(lambda: all(party.received(AllJoined) for party in joined))
    silent, other = joined[silenced], joined[1 - silenced]
    parties.all.remove(silent)  # it gets no more turns
    parties.pass_s(33)
    parties.all.append(silent)
    parties.until(lambda: silent.received(NodeLost))

    (found,) = other.received(NodeLost)
    why = found.why
    assert (why.startswith(f"{SILENT} 3"), found.is_silent) == (True, True)
    (lost,) = silent.received(NodeLost)
    assert (lost.why, lost.is_silent) == (f"it dropped this node: {why}", True)


def test_each_phase_of_the_coordinator_is_reached(parties: Parties) -> None:
    """By each arrow of the diagram."""
    for wait_s in (0, 40, None):
        coordinator = parties.coordinator(2, return_s=30.0)
        other = parties.participant(info("node1", 1))
        parties.until(
            lambda one=coordinator, two=other: one.received(AllJoined) and two.received(AllJoined)
        )
        parties.remove(other)
        if wait_s is not None:  # else the launch ends at once
            parties.until(lambda one=coordinator: one.received(NodeLost))
            coordinator.send(NextBegins(generation=1, cause=WHY, at_ns=0))
            parties.pass_s(wait_s, step_s=5)
        coordinator.send(OVER)

    assert unseen(CoordinatorPhase) == []
