"""A node that connects to node 0: what may answer there, and what it reports."""

from __future__ import annotations

import ctypes
import json
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, cast

import pytest
from msgspec.structs import replace

from meshrun.host.network import listen_on
from meshrun.plan.rendezvous_config import fallback_port
from meshrun.protocol.collectives import AskTimes, GroupCalls, RankTimes
from meshrun.protocol.events import (
    AllCleared,
    AllJoined,
    JoinFailed,
    LaunchOver,
    NextBegins,
    NodeLost,
    ShowStacks,
    TimesReported,
)
from meshrun.protocol.generation import NodeOutcome, RankState
from meshrun.protocol.rank_end import RankExited
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.frames import FrameWriter
from meshrun.rendezvous.handshake import VERSION, CoordinatorHandshake
from meshrun.rendezvous.messages import (
    Cleared,
    Failed,
    Leave,
    Rejected,
    Times,
    Waiting,
    Welcome,
    encode,
)
from meshrun.rendezvous.node_phases import ConnectionPhase, EndpointPhase, ParticipantPhase
from meshrun.rendezvous.participant import Participant
from tests.diagrams import unseen
from tests.kit import HUNG_UP, NOT_A_LAUNCHER, SILENT
from tests.parties import SECRET, WHY, Parties, Party, S, info


@pytest.fixture
def other(parties: Parties) -> Iterator[socket.socket]:
    """Return a listener at the coordinator's address that is not meshrun."""
    with closing(listen_on("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        parties.port = listener.getsockname()[1]
        yield listener


def accepted(parties: Parties, listener: socket.socket) -> socket.socket:
    """Accept the next connection."""
    found: list[socket.socket] = []

    def look() -> bool:
        with suppress(BlockingIOError):
            found.append(listener.accept()[0])
        return bool(found)

    parties.until(look)
    return found[0]


def was_left(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection, and read what it sent before."""
    try:
        return not connection.recv(1 << 16, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", NOT_A_LAUNCHER),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", NOT_A_LAUNCHER),
        (b"\x00" * 5000, NOT_A_LAUNCHER),
        (b'{"meshrun": 99, "nonce": "0"}\n', f"version 99, but this one speaks {VERSION}"),
        (b"", HUNG_UP),
    ],
    ids=["http", "ssh", "zeros", "another version", "nothing"],
)  # fmt: skip
def test_something_else_answers(
    parties: Parties, other: socket.socket, said: bytes, told: str
) -> None:
    """One note says so; the participant keeps retrying, and in the end that is its error."""
    participant = parties.participant(info("node1"), timeout_s=20.0)
    for _ in range(2):
        with closing(accepted(parties, other)) as connection:
            connection.sendall(said)
        parties.until(lambda: any(told in note for note in participant.notes))
        parties.pass_s(1)
    assert len([note for note in participant.notes if note.endswith(f"{told}; retrying")]) == 1

    def answer() -> object:
        with suppress(BlockingIOError), closing(other.accept()[0]) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            parties.until(lambda: was_left(connection))  # it has read this, however busy we are
        parties.pass_s(1)
        return participant.received(JoinFailed)

    parties.until(answer)
    error = participant.received(JoinFailed)[0].error

    assert error.exit_code == 69
    place = f"node 0 at 127.0.0.1:{parties.port}"
    if said:
        assert error.message.startswith(f"cannot join {place}: ")
        assert error.message.endswith(told)
    else:  # as a proxy does while nothing listens behind it
        assert error.message.startswith(f"cannot join {place} within 20 s: ")


def test_something_that_says_nothing(parties: Parties, other: socket.socket) -> None:
    """A note appears soon; the participant retries after --node-timeout."""
    participant = parties.participant(info("node1"), node_timeout_s=20.0)
    with closing(accepted(parties, other)):
        parties.pass_s(4)

        told = "it accepts connections but does not answer"
        assert any(told in note for note in participant.notes)
        with closing(accepted(parties, other)):  # it retries
            parties.until(lambda: parties.pass_s(1) or participant.received(JoinFailed))
    error = participant.received(JoinFailed)[0].error
    assert error.message.endswith(told)
    assert error.hint is not None
    assert "stopped or slow" in error.hint


def welcome(**wrong: Any) -> Welcome:
    """Return what node 0 sends to node1 in launch r, with some other values."""
    right = {"node_rank": 1, "hosts": ("node0", "node1"), "nproc_per_node": (1, 1), "run_id": "r"}
    return Welcome(**{**right, "store_port": 1, **wrong})


CLEARED = Cleared(generation=0, outcome=NodeOutcome())
LEAVE = Leave(generation=0, why="it leaves")
NEXT = NextBegins(generation=1, cause=WHY, at_ns=0)
OVER = LaunchOver(exit_code=0, signum=None, preempted=False, headline="", generation=0, at_ns=0)
REJECTED = Rejected(message="it was excluded", hint=None, exit_code=71)
SPARE = Waiting(text="it is a spare", has_begun=True)


def greet(parties: Parties, listener: socket.socket) -> Connection:
    """Accept the next connection as a coordinator whose own address is 127.0.9.1."""
    accepting = CoordinatorHandshake(SECRET, "127.0.9.1")
    return Connection(accepted(parties, listener), accepting, Party(parties.clock).hub)


@pytest.mark.parametrize("is_reached", [True, False])
def test_the_coordinators_own_address_is_preferred(
    parties: Parties, other: socket.socket, is_reached: bool
) -> None:
    """A Service's address leads to no other port, such as that of the ranks' store."""
    participant = parties.participant(info("node1"), node_timeout_s=1e6)
    with closing(listen_on("127.0.9.1", parties.port)) as own:
        own.setblocking(False)
        greeted = [greet(parties, other)]
        if is_reached:
            greeted.append(greet(parties, own))
    if not is_reached:
        greeted.append(greet(parties, other))
    greeted[-1].send(Waiting(text="it waits"))
    parties.until(lambda: greeted[-1].receive() and "it waits" in participant.notes)

    place = "127.0.9.1" if is_reached else "127.0.0.1"
    assert greeted[-1].own_address == place
    for each in greeted:
        each.close("")


def test_a_slow_answer_is_waited_for(parties: Parties, other: socket.socket) -> None:
    """With a round trip of seconds, the greeting arrives long before the proof."""
    participant = parties.participant(info("node1"), node_timeout_s=2.0)
    accepting = CoordinatorHandshake(SECRET)
    with closing(accepted(parties, other)):
        parties.pass_s(4)  # the first attempt is short
    with closing(accepted(parties, other)) as connection:
        parties.pass_s(5)
        connection.sendall(accepting.greeting)
        parties.pass_s(5)
        reply, key = accepting.answer(connection.recv(4096).partition(b"\n")[0])
        waiting = FrameWriter(key, "coordinator").frame(encode(Waiting(text="it waits")))
        connection.sendall(reply + waiting)
        parties.until(lambda: "it waits" in participant.notes)

    assert not participant.received(JoinFailed)


def test_a_launcher_that_does_not_go_on_is_no_other_program(
    parties: Parties, other: socket.socket
) -> None:
    """It has greeted this node, so it is waited for as if it had not started yet."""
    participant = parties.participant(info("node1"), node_timeout_s=2.0)
    for _ in range(2):
        with closing(accepted(parties, other)) as connection:
            connection.sendall(CoordinatorHandshake(SECRET).greeting)
            parties.pass_s(11)

    assert any("its answer took more than 10 s" in note for note in participant.notes)
    assert not participant.received(JoinFailed)


def test_a_coordinator_with_another_secret_is_rejected(
    parties: Parties, other: socket.socket
) -> None:
    """It cannot prove that it knows the secret."""
    participant = parties.participant(info("node1"))
    with closing(accepted(parties, other)) as connection:
        connection.sendall(
            CoordinatorHandshake(b"other").greeting + b'{"proof": "' + b"0" * 64 + b'"}\n'
        )
        parties.until(
            lambda: any("does not have this launch's secret" in note for note in participant.notes)
        )

    assert not participant.received(AllJoined)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"nproc_per_node": [1, 64]}, "node 1 to be node1 with 64 workers of launch r, "),
        ({"node_rank": 0}, "node 0 to be node0 with 1 worker of launch r, "),
        ({"hosts": ["node0", "node7"]}, "node 1 to be node7 with 1 worker"),
        ({"run_id": "another"}, "of launch another, but this is node1 with 1 worker"),
    ],
    ids=["more workers", "node 0", "another host", "another launch"],
)
def test_a_welcome_with_wrong_values_is_rejected(
    parties: Parties, other: socket.socket, wrong: dict[str, Any], told: str
) -> None:
    """The coordinator knows the secret, but expects other values than this node sent."""
    participant = parties.participant(info("node1"), run_id="r")
    accepting = CoordinatorHandshake(SECRET)
    coordinator = Connection(accepted(parties, other), accepting, participant.hub)
    coordinator.send(welcome(**wrong))
    parties.until(lambda: coordinator.receive() or participant.received(JoinFailed))
    coordinator.close("the test is over")
    error = participant.received(JoinFailed)[0].error

    assert told in error.message
    assert error.exit_code == 69
    assert not participant.received(AllJoined)


def test_a_coordinator_whose_proxy_outlives_it(parties: Parties, other: socket.socket) -> None:
    """The proxy accepts each connection, and closes it, as nothing listens behind it any more."""
    participant = parties.participant(info("node1"), node_timeout_s=20.0)
    coordinator = Connection(
        accepted(parties, other), CoordinatorHandshake(SECRET), participant.hub
    )
    parties.until(coordinator.receive)
    coordinator.close("it has ended")
    for _ in range(30):
        with suppress(BlockingIOError):
            other.accept()[0].close()
        parties.pass_s(1)
    error = participant.received(JoinFailed)[0].error

    assert error.message.endswith(f"within 20 s: {HUNG_UP}")


def test_what_answered_before_the_coordinator_is_forgotten(
    parties: Parties, other: socket.socket
) -> None:
    """A lost coordinator is reconnected to, even if another launch was still ending at first."""
    participant = parties.participant(info("node1"), least_nodes=1, run_id="r")
    with closing(accepted(parties, other)) as connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
    parties.until(lambda: participant.notes)
    coordinator = Connection(
        accepted(parties, other), CoordinatorHandshake(SECRET), participant.hub
    )
    coordinator.send(welcome())
    parties.until(lambda: coordinator.receive() or participant.received(AllJoined))
    parties.pass_s(10)
    coordinator.close("it has ended")
    participant.send(Cleared(generation=0, outcome=NodeOutcome()))
    parties.until(lambda: participant.received(NodeLost))
    with closing(accepted(parties, other)):
        assert not participant.received(JoinFailed)


def test_a_suspended_coordinator_is_waited_for(parties: Parties, other: socket.socket) -> None:
    """Its kernel accepts connections; a node that was in its launch does not give up meanwhile."""
    participant = parties.participant(info("node1"), least_nodes=1, node_timeout_s=5.0)
    suspended = Party(parties.clock)  # which takes no turns
    coordinator = Connection(accepted(parties, other), CoordinatorHandshake(SECRET), suspended.hub)
    coordinator.send(SPARE)
    parties.until(lambda: coordinator.receive() or SPARE.text in participant.notes)
    for _ in range(2):
        with closing(accepted(parties, other)):
            parties.pass_s(4)
    assert any("accepts connections but does not answer" in note for note in participant.notes)
    with closing(accepted(parties, other)):
        assert not participant.received(JoinFailed)
    coordinator.close("the test is over")
    suspended.reactor.close()


@pytest.mark.parametrize("late", [welcome(), NEXT], ids=["Welcome", "NextBegins"])
def test_a_node_that_leaves_takes_part_no_more(
    parties: Parties, other: socket.socket, late: Welcome | NextBegins
) -> None:
    """Node 0 may have sent it a decision before it receives the message."""
    participant = parties.participant(info("node1"), least_nodes=1, run_id="r")
    coordinator = Connection(
        accepted(parties, other), CoordinatorHandshake(SECRET), participant.hub
    )
    coordinator.send(welcome())
    parties.until(lambda: coordinator.receive() or participant.received(AllJoined))
    participant.send(CLEARED)
    participant.send(LEAVE)
    coordinator.send(late)
    coordinator.send(ShowStacks())
    parties.until(lambda: participant.asked)
    coordinator.close("it left")
    parties.turn(5)

    assert cast("Participant", participant.side)._phase is ParticipantPhase.OVER
    assert not participant.received(NodeLost)


@pytest.mark.parametrize("wrong", [REJECTED, welcome(node_rank=0)], ids=["Rejected", "Welcome"])
def test_a_coordinator_that_breaks_off_is_lost(
    parties: Parties, other: socket.socket, wrong: Rejected | Welcome
) -> None:
    """While this node takes part, meshrun sends neither: no decision is waited for."""
    participant = parties.participant(info("node1"), run_id="r")
    coordinator = Connection(
        accepted(parties, other), CoordinatorHandshake(SECRET), participant.hub
    )
    for message in (welcome(), wrong):
        coordinator.send(message)
    parties.until(lambda: coordinator.receive() or participant.received(NodeLost))
    coordinator.close("the test is over")

    assert participant.received(AllJoined)
    assert not participant.received(JoinFailed)


def test_what_answers_redirects_a_node_only_once(parties: Parties, other: socket.socket) -> None:
    """Two addresses that name each other would keep it connecting."""
    participant = parties.participant(info("node1"))
    with closing(socket.create_server(("127.0.0.2", parties.port))) as second:
        second.setblocking(False)
        with closing(accepted(parties, other)) as connection:
            connection.sendall(CoordinatorHandshake(b"", "127.0.0.2").greeting)
            with closing(accepted(parties, second)) as redirected:
                redirected.sendall(CoordinatorHandshake(b"", "127.0.0.1").greeting)
                redirected.setblocking(False)
                answer = bytearray()

                def look() -> bool:
                    with suppress(BlockingIOError):
                        answer.extend(redirected.recv(4096))
                    return bool(answer)

                parties.until(look)

    assert b"proof" in answer
    assert not participant.received(JoinFailed)


def test_text_of_other_hosts_moves_no_cursor(parties: Parties, other: socket.socket) -> None:
    """A rejection needs no proof, so it is escaped and shown as one line."""
    participant = parties.participant(info("node1"))
    with closing(accepted(parties, other)) as connection:
        rejected = json.dumps({"rejected": "\x1b[2J\nmeshrun: all is well"}).encode()
        connection.sendall(CoordinatorHandshake(b"").greeting + rejected + b"\n")
        parties.until(lambda: participant.notes)

    assert participant.notes[0].endswith(r": \x1b[2J\nmeshrun: all is well; retrying")


@contextmanager
def refused_port(parties: Parties) -> Iterator[None]:
    """Hold a port that refuses connections, so nothing else can listen there."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        parties.port = reserved.getsockname()[1]
        yield


def test_a_note_says_that_no_coordinator_listens(parties: Parties) -> None:
    """Every few seconds, with the address and the error."""
    with refused_port(parties):
        participant = parties.participant(info("node1"))
        parties.pass_s(9)
        told = [note for note in participant.notes if "Connection refused" in note]
        parties.remove(participant)

    assert len(told) == 2
    assert told[0].startswith(f"waiting for node 0 at 127.0.0.1:{parties.port}: ")


def test_an_address_of_this_machine_that_came_late_is_reported(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher looks for node 0; only a new one on this machine would be it."""
    monkeypatch.setattr("meshrun.rendezvous.attempts.is_loopback", lambda _: False)
    with refused_port(parties):
        participant = parties.participant(info("node1"), timeout_s=60.0)
        parties.until(lambda: cast("Participant", participant.side)._attempts._dialer.own)
        parties.pass_s(61)
    error = participant.received(JoinFailed)[0].error

    told = "127.0.0.1 is an address of this machine: start meshrun here again"
    assert str(error.hint).startswith(told)


def test_a_coordinator_that_never_starts_is_reported(parties: Parties) -> None:
    """With the last error, how long it has been the same, and what to check."""
    with refused_port(parties):
        participant = parties.participant(info("node1"), timeout_s=18.0)
        attempts = cast("Participant", participant.side)._attempts
        parties.until(lambda: attempts._found is EndpointPhase.NOTHING)
        parties.pass_s(2)
        parties.until(lambda: " for " in attempts._why)  # by another attempt, however long it takes
        parties.pass_s(20)
    error = participant.received(JoinFailed)[0].error

    assert error.exit_code == 69
    refused = r"within 18 s: Connection refused for \d+ s"
    assert re.search(refused, error.message)
    assert str(error.hint).startswith("check that node 0's launcher is running")
    is_long = [
        "its launcher has not started yet or has exited (" in note for note in participant.notes
    ]
    assert is_long == [False, False, True]


def joined(parties: Parties, *, ahead_ns: int = 0) -> tuple[Party, Party]:
    """Return a coordinator and a participant that have joined."""
    coordinator = parties.coordinator(2, node_timeout_s=30.0)
    joining = replace(info("node1"), launcher="n1")
    participant = parties.participant(joining, ahead_ns=ahead_ns)
    parties.until(lambda: coordinator.received(AllJoined) and participant.received(AllJoined))
    return coordinator, participant


def test_a_coordinator_that_closes_is_lost_at_once(parties: Parties) -> None:
    """The participant waits for no timeout."""
    coordinator, participant = joined(parties)
    parties.remove(coordinator)
    parties.until(lambda: participant.received(NodeLost))

    lost = participant.received(NodeLost)[0]
    assert (lost.node_rank, lost.why) == (0, HUNG_UP)


def reset(party: Party) -> None:
    """Reset the connection of a participant, as a firewall does: both ends get an error."""
    connection = cast("Participant", party.side)._connection
    assert connection is not None
    assert ctypes.CDLL(None).connect(connection.fileno(), bytes(16), 16) == 0  # to AF_UNSPEC


def test_a_reset_connection_is_resumed(parties: Parties) -> None:
    """What was under way then, or is sent meanwhile, arrives once, in both directions."""
    coordinator, participant = joined(parties, ahead_ns=5 * S)

    def send(text: str) -> None:
        coordinator.send(ShowStacks(why=text))
        participant.send(Times(generation=0, answers=[], why={0: text}))

    def received() -> tuple[list[str], list[str]]:
        answers = coordinator.received(TimesReported)
        return participant.asked, [answer.why[0] for answer in answers]

    sent = [f"{when} {number}" for number in range(3) for when in ("before", "after")]
    for number in range(3):
        send(f"before {number}")
        reset(participant)
        send(f"after {number}")
        parties.until(lambda: received() == (participant.asked, participant.asked))
    assert received() == (sent, sent)

    assert coordinator.notes == ["the connection to node1 was reset and resumed"] * 3
    assert participant.notes == ["the connection to node 0 was reset and resumed"] * 3


def test_a_node_whose_address_changed_is_lost(parties: Parties) -> None:
    """The connections of its ranks end with the address, after many minutes of silence."""
    coordinator, participant = joined(parties)
    connection = cast("Participant", participant.side)._connection
    assert connection is not None
    connection.own_address = "192.0.2.7"
    reset(participant)
    parties.pass_s(8)

    (lost,) = participant.received(NodeLost)
    assert lost.why.startswith("this node's address changed from 192.0.2.7 to 127.0.0.1")
    assert coordinator.received(NodeLost)


def test_a_launch_that_ends_while_a_connection_is_reset(parties: Parties) -> None:
    """Its end arrives once the connection is resumed, even if both launchers are suspended."""
    coordinator, participant = joined(parties)
    reset(participant)
    (connection,) = cast("Coordinator", coordinator.side)._connections.values()
    while connection.phase is not ConnectionPhase.INTERRUPTED:
        coordinator.turn()
    coordinator.send(OVER)
    parties.clock.pass_s(10)
    for party in (coordinator, participant):
        party.hub.skip(10 * S)
    parties.until(lambda: participant.received(LaunchOver))

    assert not participant.received(NodeLost)


def test_a_node_ends_a_failed_launch_after_the_first(parties: Parties) -> None:
    """A scheduler ends all launchers once one has failed, and the first one has the report."""
    coordinator, participant = joined(parties)
    coordinator.send(replace(OVER, exit_code=3))
    parties.until(lambda: participant.received(LaunchOver))
    parties.all.remove(participant)
    closed: list[Party] = []

    def close(party: Party) -> None:
        party.side.close()
        closed.append(party)

    closing = threading.Thread(target=close, args=[participant])
    closing.start()
    for _ in range(20):
        coordinator.turn()
    closed.append(coordinator)
    coordinator.side.close()
    closing.join()

    assert closed == [coordinator, participant]
    participant.close()


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_reset_connection_that_is_not_resumed_is_lost(parties: Parties, waiting: int) -> None:
    """Soon: the other launcher may have been killed."""
    both = joined(parties)
    reset(both[1])
    parties.all = [both[waiting]]
    parties.pass_s(8)

    (lost,) = both[waiting].received(NodeLost)
    assert lost.why == "its connection was reset and not resumed within 5 s"
    both[1 - waiting].close()


def test_a_reset_connection_is_reported_as_closed(parties: Parties, other: socket.socket) -> None:
    """The kernel resets a connection with unread data; the note is the same."""
    participant = parties.participant(info("node1"))
    with closing(accepted(parties, other)) as connection:
        parties.until(lambda: cast("Participant", participant.side)._attempts._connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    parties.until(lambda: participant.notes)

    assert participant.notes[0].endswith(f": {HUNG_UP}; retrying")


def test_a_short_silence_is_survived(parties: Parties) -> None:
    """If a link is cut for less than the timeout, neither side reports a loss."""
    coordinator, participant = joined(parties)
    parties.all.remove(coordinator)
    parties.pass_s(20)
    parties.all.append(coordinator)
    parties.pass_s(40)

    assert not participant.received(NodeLost)
    assert not coordinator.received(NodeLost)


def test_a_long_silence_is_a_loss(parties: Parties) -> None:
    """It is reported once, with its duration."""
    coordinator, participant = joined(parties)
    parties.all.remove(coordinator)
    parties.pass_s(40)
    lost = participant.received(NodeLost)

    assert len(lost) == 1
    assert lost[0].why.startswith(f"{SILENT} 3")
    coordinator.close()


@pytest.mark.parametrize("ahead_ns", [3600 * S, -900 * S, 0], ids=["ahead", "behind", "equal"])
def test_times_of_another_clock_are_converted_to_the_local_clock(
    parties: Parties, ahead_ns: int
) -> None:
    """Each machine's monotonic clock starts when it boots."""
    coordinator, participant = joined(parties, ahead_ns=ahead_ns)
    parties.pass_s(5)
    at_ns, true_ns = participant.now_ns(), coordinator.now_ns()
    exited = RankExited(rank=1, pid=7, wait_status=256, at_ns=at_ns)
    outcome = NodeOutcome(ranks={1: RankState(pid=7, exited=exited, finished_ns=at_ns)})
    participant.send(Failed(generation=0, outcome=outcome))
    parties.turn(3)
    coordinator.send(Cleared(generation=0, outcome=NodeOutcome()))
    participant.send(Cleared(generation=0, outcome=outcome))
    parties.until(lambda: coordinator.received(AllCleared))
    (told,) = coordinator.received(AllCleared)[0].outcomes
    rank = told.ranks[1]
    assert rank.exited is not None

    # The clock of these tests moves by half a second where turns are skipped.
    assert abs(rank.exited.at_ns - true_ns) <= S
    assert rank.finished_ns == rank.exited.at_ns
    assert rank.pid == 7


@pytest.mark.parametrize("ahead_ns", [3600 * S, -900 * S], ids=["ahead", "behind"])
def test_times_of_calls_are_converted_to_the_local_clock(parties: Parties, ahead_ns: int) -> None:
    """Calls of unknown groups are dropped; an unknown rank ends the connection."""
    coordinator, participant = joined(parties, ahead_ns=ahead_ns)
    coordinator.send(AskTimes(generation=0, late=[1]))
    parties.until(lambda: participant.received(AskTimes))
    assert participant.received(AskTimes)[0].late == [1]
    at_ns, true_ns = participant.now_ns(), coordinator.now_ns()
    group = GroupCalls(name="0", description="mesh_dp", ranks=[0, 1], calls=[])
    answer = RankTimes(rank=1, at_ns=0, groups=[group], calls=[[0, 7, at_ns], [3, 8, at_ns], [0]])
    participant.send(Times(generation=0, answers=[answer], why={1: "it waited\nfor a disk"}))
    parties.until(lambda: coordinator.received(TimesReported))
    (told,) = coordinator.received(TimesReported)
    assert told.why == {1: "it waited\\nfor a disk"}
    ((place, number, began_ns),) = told.answers[0].calls

    assert (place, number) == (0, 7)
    # The clock of these tests moves by half a second where turns are skipped.
    assert abs(began_ns - true_ns) <= S
    assert 0 < told.unsure_ns <= S
    participant.send(Times(generation=0, answers=[replace(answer, rank=2)]))
    parties.until(lambda: coordinator.received(NodeLost))
    assert "it reported rank 2 of 2" in coordinator.received(NodeLost)[0].why


def test_a_participant_may_close_while_it_looks_for_the_coordinator(parties: Parties) -> None:
    """Nothing of its attempts is left."""
    participant = parties.participant(info("node1"))
    cast("Participant", participant.side)._attempts._dialer._addresses.clear()
    participant.turn()  # a name is looked up in a process of its own
    parties.remove(participant)

    assert participant.is_closed


@pytest.mark.parametrize("ahead_ns", [3600 * S, -900 * S], ids=["ahead", "behind"])
def test_the_time_of_a_failure_is_converted_to_the_local_clock(
    parties: Parties, ahead_ns: int
) -> None:
    """So a node reports how long a restart took by its own clock."""
    coordinator, participant = joined(parties, ahead_ns=ahead_ns)
    parties.pass_s(5)
    cause = replace(WHY, at_ns=coordinator.now_ns())
    coordinator.send(NextBegins(generation=1, cause=cause, at_ns=coordinator.now_ns()))
    parties.until(lambda: participant.received(NextBegins))

    # The clock of these tests moves by half a second where turns are skipped.
    assert abs(participant.received(NextBegins)[0].cause.at_ns - participant.now_ns()) <= S


FAILED = replace(OVER, exit_code=3)
ELSEWHERE = welcome(run_id="another")
LAWFUL: dict[ParticipantPhase, list[Any]] = {
    ParticipantPhase.JOINING: [
        None, b"no launcher", "close", welcome(), SPARE, OVER, FAILED, REJECTED,
    ],
    ParticipantPhase.SPARE: [None, "close", welcome(), ELSEWHERE, OVER, FAILED],
    ParticipantPhase.RUNNING: [None, "close", CLEARED, CLEARED, CLEARED, LEAVE, OVER, FAILED],
    ParticipantPhase.CLEARED: [None, "close", NEXT, NEXT, welcome(), SPARE, OVER, FAILED, REJECTED],
    ParticipantPhase.CUT_OFF: [None, CLEARED, LEAVE],
    ParticipantPhase.RETURNING: [
        None, b"no launcher", "close", welcome(), SPARE, OVER, FAILED, REJECTED,
    ],
}  # fmt: skip
"""What may happen in each phase: time passes, node 0 sends or closes, or this node reports."""
PATHS: list[list[Any]] = [
    *([end] for end in (OVER, FAILED, REJECTED)),
    *([SPARE, end] for end in (OVER, FAILED, ELSEWHERE)),
    *([welcome(), end] for end in (OVER, FAILED)),
    *([welcome(), CLEARED, end] for end in (OVER, FAILED, REJECTED)),
    [welcome(), "close", LEAVE],
    [SPARE, welcome(), CLEARED, NEXT, "close", CLEARED, welcome(), CLEARED, "close", SPARE, "close",
     OVER],
    *([SPARE, "close", end] for end in (FAILED, REJECTED)),
]  # fmt: skip


def live(parties: Parties, choose: Callable[[ParticipantPhase], Any]) -> ParticipantPhase:
    """Have a participant meet what ``choose`` says for its phase; return its last phase."""
    coordinator = None
    with closing(listen_on("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        parties.port = listener.getsockname()[1]
        participant = parties.participant(info("node1"), least_nodes=1, run_id="r")
        side = cast("Participant", participant.side)
        while side._phase in LAWFUL:
            does = choose(side._phase)
            if isinstance(does, Cleared | Leave):
                participant.send(does)
            elif side._phase is not ParticipantPhase.CUT_OFF and does is not None:
                if coordinator is None or coordinator.closed is not None:
                    connection = accepted(parties, listener)
                    if isinstance(does, bytes):
                        connection.sendall(does)
                        connection.close()
                        continue
                    coordinator = Connection(connection, CoordinatorHandshake(SECRET), side._hub)
                    parties.until(coordinator.receive)
                if isinstance(does, str):
                    coordinator.close(does)
                elif not isinstance(does, bytes):
                    coordinator.send(does)
            parties.pass_s(1)
            if coordinator is not None:
                coordinator.receive()
        if coordinator is not None:
            coordinator.close("the test is over")
        parties.remove(participant)
    return side._phase


def test_each_phase_of_a_participant_is_reached(parties: Parties) -> None:
    """By each arrow of the diagram."""
    for path in PATHS:
        steps = iter(path)
        live(parties, lambda _, steps=steps: next(steps))
        assert not list(steps)

    assert unseen(ParticipantPhase) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(50))
def test_phases_follow_the_diagram_in_any_history(parties: Parties, seed: int) -> None:
    """However often connections end; each change of a phase is checked."""
    choose = random.Random(seed).choice
    last = live(parties, lambda phase: choose(LAWFUL[phase]))

    assert last in (ParticipantPhase.LINGERING, ParticipantPhase.OVER, ParticipantPhase.FAILED)


def test_each_phase_of_a_connection_is_reached(parties: Parties) -> None:
    """By each arrow of the diagram."""
    _, participant = joined(parties)
    with suppress(OSError), closing(parties.outsider(b"no launcher\n")) as outsider:
        parties.until(lambda: outsider.recv(1))  # it is rejected
    connection = cast("Participant", participant.side)._connection
    assert connection is not None
    reset(participant)
    parties.until(lambda: connection.received and participant.notes)
    connection.own_address = "192.0.2.7"
    reset(participant)
    parties.until(lambda: participant.received(NodeLost))
    coordinator, participant = joined(parties)
    parties.remove(participant)
    parties.until(lambda: coordinator.received(NodeLost))

    assert unseen(ConnectionPhase) == []


def test_whatever_may_be_at_the_endpoint_is_noticed(parties: Parties) -> None:
    """By each arrow of the diagram."""
    with refused_port(parties):
        port = parties.port
    participant = parties.participant(info("node1"), node_timeout_s=100.0)
    attempts = cast("Participant", participant.side)._attempts

    def until(found: EndpointPhase) -> None:
        parties.until(lambda: parties.pass_s(0.1, step_s=0.1) or attempts._found is found)

    for answers in ([b"", b"SSH-2.0\n", b""], [b"SSH-2.0\n"]):
        until(EndpointPhase.NOTHING)
        with closing(listen_on("127.0.0.1", port)) as listener:
            listener.setblocking(False)
            for answer in answers:
                with closing(accepted(parties, listener)) as connection:
                    connection.sendall(answer)
                until(EndpointPhase.FOREIGN if answer else EndpointPhase.UNKNOWN)
    until(EndpointPhase.NOTHING)
    with (
        closing(listen_on("127.0.0.1", port)) as listener,
        closing(listen_on("127.0.0.1", fallback_port(SECRET))) as fallback,
    ):
        for each in (listener, fallback):
            each.setblocking(False)
        with closing(accepted(parties, listener)) as connection:
            connection.sendall(b"SSH-2.0\n")
        until(EndpointPhase.FALLBACK)
        coordinator = Connection(
            accepted(parties, fallback), CoordinatorHandshake(SECRET), participant.hub
        )
        parties.until(lambda: coordinator.receive() or attempts._found is EndpointPhase.UNKNOWN)
        coordinator.close("the test is over")

    assert unseen(EndpointPhase) == []
