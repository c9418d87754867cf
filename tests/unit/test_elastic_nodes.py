"""Launchers of an elastic launch: which are admitted, which participate, which rejoin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import NoReturn

import pytest
from msgspec.structs import replace

from meshrun.errors import NodeLostError, UsageError
from meshrun.host.network import listen_on
from meshrun.layout import Layout
from meshrun.protocol.events import (
    AllCleared,
    AllJoined,
    GenerationAborted,
    JoinFailed,
    LaunchOver,
    NextBegins,
    NodeLost,
)
from meshrun.protocol.generation import NodeOutcome, Withdraw
from meshrun.rendezvous.messages import Cleared, Finished, Join, Leave
from tests.kit import HUNG_UP, NOT_A_LAUNCHER, SILENT, all_running, lost_node
from tests.parties import WHY, Parties, Party, info

MOST = 3
OVER = LaunchOver(exit_code=0, signum=None, preempted=False, headline="", generation=0, at_ns=0)


def fit(nodes: Sequence[Join]) -> Layout:
    return Layout.parse("dp=1:8", nproc_per_node=[node.nproc for node in nodes])


def newcomer(
    parties: Parties, name: str, *, rank: int | None = None, launcher: str = "", **settings: str
) -> Party:
    """Add a node that joins later, or one of the first if it has a rank."""
    joining = replace(info(name, rank, **settings), launcher=launcher or name)
    return parties.participant(joining, nnodes=MOST, least_nodes=1, return_s=60.0)


@pytest.fixture
def two(parties: Parties) -> list[Party]:
    """A coordinator and a participant whose ranks run, with their events so far removed."""
    coordinator = parties.coordinator(MOST, fit=fit, there=2, least_nodes=1, return_s=60.0)
    joined = [coordinator, newcomer(parties, "node1", rank=1)]
    parties.until(lambda: all(party.received(AllJoined) for party in joined))
    forget(joined)
    return joined


def forget(those: Sequence[Party]) -> None:
    for party in those:
        party.events.clear()
        party.notes.clear()


def start_next_generation(parties: Parties, those: Sequence[Party], generation: int) -> None:
    """Report on all nodes that one generation has ended, and order the next."""
    for party in reversed(those):
        party.send(Cleared(generation=generation - 1, outcome=NodeOutcome()))
    parties.until(lambda: those[0].received(AllCleared))
    those[0].send(NextBegins(generation=generation, cause=WHY, at_ns=0))


def grown(parties: Parties, two: Sequence[Party], host: str = "node2") -> Party:
    """Add a third node, and wait until its ranks run; return it."""
    third = newcomer(parties, host, launcher="third")
    parties.until(lambda: all(party.received(GenerationAborted) for party in two))
    start_next_generation(parties, two, 1)
    parties.until(lambda: third.received(AllJoined) and two[1].received(AllJoined))
    return third


def hosts_of(party: Party) -> tuple[str, ...]:
    """Return the hosts of the latest generation that a party began."""
    return party.received(AllJoined)[-1].hosts


def test_a_newcomer_ends_the_generation_and_takes_part(parties: Parties, two: list[Party]) -> None:
    """All receive the reason; the count of generations continues."""
    three = [*two, newcomer(parties, "node2")]
    parties.until(lambda: all(party.received(GenerationAborted) for party in two))
    assert two[1].received(GenerationAborted)[0].why == "node2 joins: dp 2 -> 3"
    assert two[0].received(GenerationAborted)[0].resizes
    start_next_generation(parties, two, 1)
    parties.until(lambda: all(party.received(AllJoined) for party in three))

    assert [party.received(AllJoined)[0].node_rank for party in three] == [0, 1, 2]
    assert {hosts_of(party) for party in three} == {("node0", "node1", "node2")}
    resize = three[2].received(AllJoined)[0].causes[0].resize
    assert resize is not None
    assert (resize.joined, resize.left, resize.shapes) == (("node2",), (), "dp 2 -> 3")
    assert three[2].received(AllJoined)[0].previous == {
        **fit([info("a"), info("b")]).to_dict(),
        "generation": 0,
    }


def test_each_generation_has_its_own_store(parties: Parties, two: list[Party]) -> None:
    """Ranks of a lost node cannot meet those that continue."""
    grown(parties, two)
    first = two[1].received(AllJoined)[0].store_port
    parties.remove(parties.all[-1])
    parties.until(lambda: two[1].received(GenerationAborted)[1:])
    forget(two)
    start_next_generation(parties, two, 2)
    parties.until(lambda: two[1].received(AllJoined))

    assert two[1].received(AllJoined)[0].store_port != first
    assert first != parties.port


def test_a_lost_address_of_the_first_node_is_reported(
    parties: Parties, two: list[Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error of the machine, not of the command."""

    def listen(addresses: Iterable[str], on: str) -> NoReturn:
        raise UsageError(f"cannot listen on `{on}` port 0", hint="on one node")

    monkeypatch.setattr("meshrun.rendezvous.node_assigner.listen_for", listen)
    newcomer(parties, "node2")
    parties.until(lambda: all(party.received(GenerationAborted) for party in two))
    start_next_generation(parties, two, 1)
    parties.until(lambda: two[0].received(JoinFailed))
    error = two[0].received(JoinFailed)[0].error

    assert error.message.startswith("this machine has lost the address 127.0.0.1")
    assert error.exit_code == 71


def test_only_a_node_with_a_different_setting_fails(parties: Parties, two: list[Party]) -> None:
    """Its error names the setting."""
    other = newcomer(parties, "node2", mesh="dp=2")
    parties.until(lambda: other.received(JoinFailed))
    parties.pass_s(3)

    error = other.received(JoinFailed)[0].error
    assert (error.message, error.exit_code) == (
        "mesh is dp=2 on node2, but not set on node0 (node 0)", 2,
    )  # fmt: skip
    assert [party.events for party in two] == [[], []]


def test_nodes_beyond_the_maximum_wait_and_end_with_the_others(
    parties: Parties, two: list[Party]
) -> None:
    """Both sides say so once, and the launch gets no event."""
    grown(parties, two)
    forget(two)
    spare = newcomer(parties, "node3")
    parties.until(lambda: spare.notes)
    parties.pass_s(700, step_s=5)
    assert spare.notes == [
        "this node is a spare: it joins when another node is lost or the mesh has room for it"
    ]
    assert (two[0].notes, two[0].events) == (["node3 is a spare"], [])
    two[0].send(OVER)
    parties.until(lambda: spare.received(LaunchOver))

    assert not spare.received(JoinFailed)


def test_a_spare_takes_the_place_of_a_lost_node(parties: Parties, two: list[Party]) -> None:
    """As soon as the others' ranks have ended."""
    third = grown(parties, two)
    spare = newcomer(parties, "node3")
    parties.until(lambda: spare.notes)
    forget([two[0]])
    parties.remove(two[1])
    parties.until(lambda: third.received(GenerationAborted))
    assert third.received(GenerationAborted)[0].why == f"{lost_node(1)}{HUNG_UP}"
    start_next_generation(parties, [two[0], third], 2)
    parties.until(lambda: spare.received(AllJoined))

    assert hosts_of(spare) == ("node0", "node3", "node2")
    assert spare.received(AllJoined)[0].causes[-1].resize.shapes == "dp=3 as before"


def test_the_launch_continues_without_a_node_that_leaves(
    parties: Parties, two: list[Party]
) -> None:
    """Before its connection closes, and with its reason; the node itself gets no more events."""
    third = grown(parties, two)
    forget(two)
    two[1].send(Leave(generation=1, why="it was stopped by SIGTERM"))
    parties.until(lambda: two[0].received(GenerationAborted))
    parties.turn(5)

    assert two[0].received(GenerationAborted)[0].why == f"{lost_node(1)}it was stopped by SIGTERM"
    assert not two[1].events
    for party in two[0], third:
        party.send(Cleared(generation=1, outcome=NodeOutcome()))
    parties.until(lambda: two[0].received(AllCleared))
    assert NodeOutcome(is_well=True) in two[0].received(AllCleared)[0].outcomes


def test_a_node_that_joins_at_the_end_disturbs_no_other(parties: Parties, two: list[Party]) -> None:
    """It ends with them."""
    for party in two:
        party.send(Finished(generation=0))
    parties.turn(5)
    late = newcomer(parties, "node2")
    parties.pass_s(3)
    assert not any(party.received(GenerationAborted) for party in two)
    two[0].send(OVER)

    parties.until(lambda: late.received(LaunchOver))


def test_a_node_that_is_lost_after_all_finished_ends_nothing(
    parties: Parties, two: list[Party]
) -> None:
    """Its ranks had nothing left to do."""
    for party in two:
        party.send(Finished(generation=0))
    parties.turn(5)
    parties.remove(two[1])
    parties.turn(5)
    two[0].send(Cleared(generation=0, outcome=NodeOutcome()))
    parties.until(lambda: two[0].received(AllCleared))

    assert not two[0].received(GenerationAborted)


def test_a_node_that_was_cut_off_rejoins(parties: Parties, two: list[Party]) -> None:
    """Once its ranks have ended; to the coordinator it is a new node."""
    coordinator, cut = two
    parties.all.remove(coordinator)
    parties.pass_s(40)
    (lost,) = cut.received(NodeLost)
    assert lost.is_silent
    assert lost.why.startswith(f"{SILENT} 3")
    parties.all.append(coordinator)
    parties.pass_s(5)
    assert coordinator.received(GenerationAborted)
    coordinator.send(Cleared(generation=0, outcome=NodeOutcome()))
    coordinator.send(NextBegins(generation=1, cause=WHY, at_ns=0))
    parties.turn(5)
    assert hosts_of(coordinator) == ("node0",)
    forget([coordinator])
    cut.send(Cleared(generation=0, outcome=NodeOutcome()))
    parties.until(lambda: coordinator.received(GenerationAborted))
    start_next_generation(parties, [coordinator], 2)
    parties.until(lambda: cut.received(AllJoined))

    assert coordinator.received(GenerationAborted)[0].why == "node1 joins: dp 1 -> 2"
    assert hosts_of(cut) == ("node0", "node1")
    assert len(cut.received(AllJoined)[0].causes) == 2


def test_a_node_that_rejoins_before_its_loss_is_noticed(parties: Parties, two: list[Party]) -> None:
    """The coordinator recognizes the launcher by its id, and does not count it twice."""
    coordinator, cut = two
    parties.all.remove(cut)
    again = newcomer(parties, "node1")
    parties.until(lambda: coordinator.received(GenerationAborted))
    start_next_generation(parties, [coordinator], 1)
    parties.until(lambda: again.received(AllJoined))

    assert hosts_of(again) == ("node0", "node1")
    assert f"{lost_node(1)}it reconnected" in coordinator.received(GenerationAborted)[0].why
    cut.close()


def test_a_lost_coordinator_is_not_searched_for(parties: Parties, two: list[Party]) -> None:
    """Nothing listens at its address, so it will not return."""
    parties.remove(two[0])
    parties.until(lambda: two[1].received(NodeLost))
    two[1].send(Cleared(generation=0, outcome=NodeOutcome()))
    parties.until(lambda: two[1].received(JoinFailed))

    error = two[1].received(JoinFailed)[0].error
    assert isinstance(error, NodeLostError)
    assert error.message == f"{lost_node(0)}{HUNG_UP}"
    assert error.exit_code == 69


def test_connections_not_from_launchers_are_rejected(parties: Parties, two: list[Party]) -> None:
    """This is reported once per address; connections that send nothing are closed."""
    for _ in range(2):
        parties.outsider(b"GET / HTTP/1.1\r\n\r\n")
    silent = parties.outsider()
    parties.until(lambda: two[0].notes)
    parties.pass_s(15)
    silent.setblocking(False)
    while silent.recv(4096):
        pass

    assert two[0].notes == [f"127.0.0.1 was rejected: {NOT_A_LAUNCHER}"]
    assert not two[0].events


@pytest.mark.nightly
def test_a_node_lost_before_the_first_generation_is_not_needed(parties: Parties) -> None:
    """If enough nodes have joined by the end of the timeout."""
    coordinator = parties.coordinator(
        MOST, fit=fit, there=3, least_nodes=2, timeout_s=20.0, return_s=60.0
    )
    second = newcomer(parties, "node2", rank=2)
    parties.pass_s(15)
    assert not coordinator.received(AllJoined)
    parties.until(lambda: coordinator.received(AllJoined) and second.received(AllJoined))

    assert hosts_of(second) == ("node0", "node2")
    assert second.received(AllJoined)[0].node_rank == 1


def test_the_others_do_not_wait_for_a_node_that_cannot_participate(parties: Parties) -> None:
    """They begin at once, and a note says so."""
    coordinator = parties.coordinator(MOST, fit=fit, there=3, least_nodes=2)
    broken = newcomer(parties, "node1", rank=1)
    broken.side.withdraw(Withdraw(host="node1", reason="no GPU was found", exit_code=2))
    third = newcomer(parties, "node2", rank=2)
    parties.until(lambda: coordinator.received(AllJoined) and third.received(AllJoined))

    assert hosts_of(third) == ("node0", "node2")
    assert coordinator.notes == ["node1 withdrew: no GPU was found"]


@pytest.mark.parametrize("last_call_s", [None, 5.0])
def test_a_node_that_withdrew_is_the_reason_for_too_few(
    parties: Parties, last_call_s: float | None
) -> None:
    """Also if others may join at any time."""
    coordinator = parties.coordinator(
        MOST, fit=fit, there=3, least_nodes=2, timeout_s=8.0, last_call_s=last_call_s
    )
    broken = newcomer(parties, "node1", rank=1)
    broken.side.withdraw(Withdraw(host="node1", reason="no GPU was found", exit_code=2))
    parties.pass_s(7)
    parties.until(lambda: coordinator.received(JoinFailed))

    (failed,) = coordinator.received(JoinFailed)
    assert failed.error.message.endswith("; node1 withdrew: no GPU was found")


def test_a_lost_node_is_the_reason_for_too_few(parties: Parties) -> None:
    """Node 0 waits for another one until the timeout."""
    coordinator = parties.coordinator(MOST, fit=fit, there=2, least_nodes=2, return_s=8.0)
    other = newcomer(parties, "node1", rank=1)
    parties.until(lambda: coordinator.received(AllJoined) and other.received(AllJoined))
    other.send(Leave(generation=0, why="it was stopped by SIGTERM"))
    parties.until(lambda: coordinator.received(GenerationAborted))
    start_next_generation(parties, [coordinator], 1)
    parties.pass_s(7)
    parties.until(lambda: coordinator.received(JoinFailed))

    (failed,) = coordinator.received(JoinFailed)
    lost, _, too_few = failed.error.message.partition("; after ")
    assert lost == f"{lost_node(1)}it was stopped by SIGTERM"
    assert too_few.endswith(" s, 1 of at least 2 nodes joined (node0)")


def test_a_node_that_could_not_participate_may_come_back(parties: Parties) -> None:
    """As one that is started again; the others are still expected."""
    coordinator = parties.coordinator(MOST, fit=fit, there=3, least_nodes=2)
    broken = newcomer(parties, "node1", rank=1)
    broken.side.withdraw(Withdraw(host="node1", reason="no GPU was found", exit_code=2))
    parties.until(lambda: coordinator.notes)
    again = newcomer(parties, "node1", rank=1, launcher="again")
    parties.pass_s(2)
    assert not coordinator.received(AllJoined)
    third = newcomer(parties, "node2", rank=2)
    parties.until(lambda: again.received(AllJoined) and third.received(AllJoined))

    assert hosts_of(third) == ("node0", "node1", "node2")


def test_a_host_whose_place_is_still_taken_by_its_lost_launcher_gets_it_back(
    parties: Parties,
) -> None:
    coordinator = parties.coordinator(MOST, fit=fit, there=3, least_nodes=2)
    lost = newcomer(parties, "node1", rank=1)
    parties.pass_s(2)
    again = newcomer(parties, "node1", rank=1, launcher="again")
    parties.pass_s(2, step_s=0.1)
    parties.remove(lost)
    parties.pass_s(10)
    third = newcomer(parties, "node2", rank=2)
    parties.until(lambda: again.received(AllJoined) and third.received(AllJoined))

    assert hosts_of(third) == ("node0", "node1", "node2")
    assert not coordinator.received(JoinFailed)


def fail_on(parties: Parties, those: Sequence[Party], generation: int, rank: int, how: str) -> None:
    """End a generation by a failure of one rank, and begin the next."""
    forget(those)
    for party in reversed(those):
        party.send(Cleared(generation=generation - 1, outcome=NodeOutcome()))
    parties.until(lambda: those[0].received(AllCleared))
    cause = replace(WHY, rank=rank, description=how, is_failure=True)
    those[0].send(NextBegins(generation=generation, cause=cause, at_ns=0))


def test_a_host_that_fails_twice_alone_is_excluded(parties: Parties, two: list[Party]) -> None:
    """A spare takes its place; the host receives the reason, also if it joins again."""
    third = grown(parties, two)
    spare = newcomer(parties, "node3")
    parties.until(lambda: two[0].notes)
    three = [*two, third]
    fail_on(parties, three, 2, 1, "exited with code 3")
    parties.until(lambda: three[1].received(NextBegins))
    fail_on(parties, three, 3, 1, "exited with code 3")
    parties.until(lambda: spare.received(AllJoined) and two[1].received(JoinFailed))
    again = newcomer(parties, "node1")
    parties.until(lambda: again.received(JoinFailed))

    why = "the last two failures were on node1 and on no other node: rank 1 exited with code 3"
    assert hosts_of(spare) == ("node0", "node3", "node2")
    for party in (two[1], again):
        error = party.received(JoinFailed)[0].error
        assert (error.message, error.exit_code) == (
            f"{why}; the other nodes continue without it",
            71,
        )
    assert f"{why}; excluding it" in two[0].notes


@pytest.mark.parametrize(
    "failures",
    [
        [(1, "exited with code 3"), (2, "exited with code 3"), (1, "exited with code 3")],
        [(2, "exited with code 3"), (1, "exited with code 3"), (1, "exited with code 3")],
        [(0, "exited with code 3"), (0, "exited with code 3")],
    ],
    ids=["in turns", "shared", "node 0"],
)
def test_a_host_that_does_not_fail_alone_stays(
    parties: Parties, two: list[Party], failures: list[tuple[int, str]]
) -> None:
    """If two hosts fail alike, the cause is the program; node 0 cannot be excluded."""
    three = [*two, grown(parties, two)]
    for generation, (rank, how) in enumerate(failures, 2):
        fail_on(parties, three, generation, rank, how)
        parties.until(lambda: all(party.received(NextBegins) for party in three))

    assert not any(party.received(JoinFailed) for party in three)


def test_a_host_name_that_several_nodes_have_is_not_excluded(
    parties: Parties, two: list[Party]
) -> None:
    """As of containers: the failures may have been on different machines."""
    three = [*two, grown(parties, two, "node1")]
    for generation, rank in ((2, 1), (3, 2)):
        fail_on(parties, three, generation, rank, f"exited with code {rank}")
        parties.until(lambda: all(party.received(NextBegins) for party in three))

    assert not any(party.received(JoinFailed) for party in three)


# ---- a fixed number of nodes ---------------------------------------------------------------------


@pytest.fixture
def fixed(parties: Parties) -> list[Party]:
    """A coordinator and two participants whose ranks run."""
    coordinator = parties.coordinator(3, return_s=30.0)
    joined = [
        coordinator,
        *(parties.participant(info(f"node{rank}", rank), nnodes=3) for rank in (1, 2)),
    ]
    parties.until(lambda: all(party.received(AllJoined) for party in joined))
    forget(joined)
    return joined


def lose(parties: Parties, fixed: list[Party], rank: int) -> list[Party]:
    """Remove a node and end the others' ranks; return the remaining nodes."""
    parties.remove(fixed[rank])
    left = [party for party in fixed if party is not fixed[rank]]
    parties.until(lambda: left[0].received(NodeLost) and left[1].received(GenerationAborted))
    start_next_generation(parties, left, 1)
    return left


def test_a_restarted_node_gets_its_place_back(parties: Parties, fixed: list[Party]) -> None:
    """Even if it is not the last node; the others wait for it."""
    left = lose(parties, fixed, 1)
    parties.pass_s(20)
    assert not left[0].received(AllJoined)
    back = parties.participant(info("node1", 1), nnodes=3)
    parties.until(lambda: all(party.received(AllJoined) for party in (*left, back)))

    assert [party.received(AllJoined)[0].node_rank for party in (*left, back)] == [0, 2, 1]
    assert hosts_of(back) == ("node0", "node1", "node2")
    assert back.received(AllJoined)[0].causes[0].description == WHY.description


def test_a_node_that_does_not_return_ends_the_others(parties: Parties, fixed: list[Party]) -> None:
    """After the time limit, with an error that names it."""
    left = lose(parties, fixed, 2)
    parties.until(lambda: parties.pass_s(5) or left[0].received(JoinFailed))
    error = left[0].received(JoinFailed)[0].error

    assert error.exit_code == 69
    assert error.message.startswith(f"{lost_node(2)}{HUNG_UP}; after 3")
    assert "--node-timeout" in str(error.hint)


def test_the_first_of_two_lost_nodes_is_named(parties: Parties, fixed: list[Party]) -> None:
    """If another node is lost while the others wait for it."""
    left = lose(parties, fixed, 2)
    parties.remove(left[1])
    parties.until(lambda: len(left[0].received(NodeLost)) == 2)
    parties.until(lambda: parties.pass_s(5) or left[0].received(JoinFailed))

    message = left[0].received(JoinFailed)[0].error.message
    assert message.startswith(f"{lost_node(2)}{HUNG_UP}; after 3")
    assert message.endswith("1 of 3 nodes joined (node0)")
    assert "1 of 3 nodes joined (node0) (" in left[0].notes[-1]


@pytest.mark.parametrize(
    ("rank", "message"),
    [(None, all_running("node0", "node1", "node2")),
     (1, all_running("node0", "node1", "node2")),
     (5, "node9 has --node-rank 5; it must be 1 to 2")],
)  # fmt: skip
def test_a_surplus_node_ends_at_once(
    parties: Parties, fixed: list[Party], rank: int | None, message: str
) -> None:
    """The others get no event."""
    surplus = parties.participant(info("node9", rank), nnodes=3)
    parties.until(lambda: surplus.received(JoinFailed))
    error = surplus.received(JoinFailed)[0].error

    assert (error.message, error.exit_code) == (message, 2)
    assert [party.events for party in fixed] == [[], [], []]


def test_a_silent_host_may_rejoin_before_it_counts_as_lost(
    parties: Parties, fixed: list[Party]
) -> None:
    """As after a power cut: its old connection is still open, but silent."""
    parties.all.remove(silent := fixed[2])
    parties.pass_s(6)
    back = parties.participant(info("node2", 2), nnodes=3)
    left = fixed[:2]
    parties.until(lambda: left[0].received(NodeLost) and left[1].received(GenerationAborted))
    start_next_generation(parties, left, 1)
    parties.until(lambda: back.received(AllJoined))
    silent.close()

    assert left[0].received(NodeLost)[0].why == "its launcher restarted"


def test_a_spare_reconnects_at_intervals(parties: Parties, two: list[Party]) -> None:
    """Even if something else has taken the coordinator's port, and closes each connection."""
    those = [*two, grown(parties, two)]
    spare = newcomer(parties, "node3")
    parties.until(lambda: spare.notes)
    for party in those:
        parties.remove(party)
    attempts = 0
    with closing(listen_on("127.0.0.1", parties.port)) as other:
        other.setblocking(False)
        for _ in range(2 * 100):
            parties.pass_s(0.5)
            with suppress(BlockingIOError):
                other.accept()[0].close()
                attempts += 1

    assert sum("reconnecting" in note for note in spare.notes) == 1
    assert spare.received(JoinFailed)
    assert 1 < attempts < 2 * 70
