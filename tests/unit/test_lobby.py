"""Node 0 admits the others: who gets in, who does not, and who cannot keep others out."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import pytest

from meshrun.protocol.events import AllJoined, JoinFailed
from meshrun.protocol.generation import Withdraw
from meshrun.rendezvous.frames import FrameWriter
from meshrun.rendezvous.handshake import ParticipantHandshake
from meshrun.rendezvous.messages import Message, Waiting, encode
from tests.kit import NOT_A_LAUNCHER, OF_ANOTHER_LAUNCH, withdrew
from tests.parties import SECRET, Parties, S, info

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
    "zeros": b"\x00" * 64 + b"\n",
    "a torch store's client": bytes.fromhex("0312345678") + b"\x0a" * 40,
    "an endless line": b"x" * 5000,
    "a line of json": b'{"nonce": 1, "proof": []}\n',
    "empty lines": b"\n" * 300,
}
WRONG_PROOF = b'{"nonce": "0", "proof": "0"}\n'


def test_nodes_meet(parties: Parties) -> None:
    """Each receives its rank, the names of all nodes, and the address of the store."""
    coordinator = parties.coordinator(3)
    late, early = (parties.participant(info(f"node{n}"), nnodes=3) for n in (2, 1))
    parties.until(lambda: all(party.received(AllJoined) for party in (coordinator, early, late)))
    joined = [party.received(AllJoined)[0] for party in (coordinator, early, late)]

    assert [each.node_rank for each in joined] == [0, 1, 2]
    assert {each.hosts for each in joined} == {("node0", "node1", "node2")}
    ((run_id, address, port),) = {
        (each.run_id, each.store_address, each.store_port) for each in joined
    }
    assert (run_id, address) == ("run", "127.0.0.1")
    assert port != parties.port, "the launchers' port is still in use"


def test_a_range_of_nodes_may_end_at_one(parties: Parties) -> None:
    """Then it waits for no other node."""
    coordinator = parties.coordinator(1)
    coordinator.side.begin()  # type: ignore[union-attr]
    parties.until(lambda: coordinator.received(AllJoined))

    assert coordinator.received(AllJoined)[0].hosts == ("node0",)


def test_another_secret_is_not_admitted(parties: Parties) -> None:
    """Both sides report it, the coordinator once; it keeps waiting and admits the right node."""
    coordinator = parties.coordinator(2)
    wrong = parties.participant(info("thief"), secret=b"other")
    parties.until(lambda: any("was rejected" in note for note in coordinator.notes))
    parties.pass_s(3)
    right = parties.participant(info("node1"))
    parties.until(lambda: right.received(AllJoined))

    assert coordinator.notes.count(f"127.0.0.1 was rejected: {OF_ANOTHER_LAUNCH}") == 1
    assert any(OF_ANOTHER_LAUNCH in note for note in wrong.notes)
    assert coordinator.received(AllJoined)[0].hosts == ("node0", "node1")
    assert not wrong.received(AllJoined)


def test_nodes_with_another_secret_in_place_of_all_missing_ones_end_the_launch(
    parties: Parties,
) -> None:
    """At once: no other node is expected that could be told."""
    coordinator = parties.coordinator(2)
    parties.participant(info("node1"), secret=b"other")
    parties.until(lambda: parties.pass_s(0.1, step_s=0.1) or coordinator.received(JoinFailed))

    message = coordinator.received(JoinFailed)[0].error.message
    assert "127.0.0.1 has a different --rdzv-id or MESHRUN_SECRET" in message
    assert coordinator.side.all_notified  # type: ignore[union-attr]


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_at_the_port_is_dropped(parties: Parties, sent: bytes) -> None:
    """The connection is closed, and the nodes join."""
    coordinator = parties.coordinator(2)
    outsider = parties.outsider(sent)
    outsider.setblocking(False)
    parties.until(lambda: _is_closed(outsider))
    parties.participant(info("node1"))
    parties.until(lambda: coordinator.received(AllJoined))

    assert f"127.0.0.1 was rejected: {NOT_A_LAUNCHER}" in coordinator.notes


WITHDRAW = Withdraw(host="node1", reason="SyntaxError: invalid syntax", exit_code=3)


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_node_that_withdraws_ends_the_launch(parties: Parties, has_joined: bool) -> None:
    """All nodes receive the reason, including those that join later."""
    coordinator = parties.coordinator(4)
    waiting, broken = (
        parties.participant(info("node2"), nnodes=4),
        parties.participant(info("node1")),
    )
    if has_joined:
        parties.until(
            lambda: parties.pass_s(1) or any("3 of 4" in note for note in coordinator.notes)
        )
    broken.side.withdraw(WITHDRAW)  # type: ignore[union-attr]
    parties.until(
        lambda: all(party.received(JoinFailed) for party in (coordinator, waiting, broken))
    )
    assert not coordinator.side.all_notified  # type: ignore[union-attr]
    late = parties.participant(info("node3"), nnodes=4)
    parties.until(lambda: late.received(JoinFailed))
    errors = [party.received(JoinFailed)[0].error for party in parties.all]

    assert {error.message for error in errors} == {
        f"{withdrew('node1')}SyntaxError: invalid syntax"
    }
    assert {error.exit_code for error in errors} == {3}
    assert all(party.side.all_notified for party in parties.all)  # type: ignore[union-attr]
    assert not any(party.received(AllJoined) for party in parties.all)


def test_the_last_node_to_join_does_not_begin_a_failed_launch(parties: Parties) -> None:
    """The coordinator that withdrew sends it the reason."""
    coordinator = parties.coordinator(2)
    coordinator.side.withdraw(WITHDRAW)  # type: ignore[union-attr]
    participant = parties.participant(info("node2"))
    parties.until(lambda: participant.received(JoinFailed))

    assert coordinator.side.all_notified  # type: ignore[union-attr]
    assert not coordinator.received(AllJoined)


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed; discards what it sent before."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_silent_connection_is_closed(parties: Parties) -> None:
    """After ten seconds, and not before."""
    parties.coordinator(2)
    outsider = parties.outsider()
    outsider.setblocking(False)
    parties.turn(5)
    parties.pass_s(9)
    assert not _is_closed(outsider)
    parties.pass_s(3)

    assert _is_closed(outsider)


@pytest.mark.parametrize("origins", [1, 60], ids=["from one address", "from many"])
def test_other_connections_do_not_keep_participants_out(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, origins: int
) -> None:
    """They are silent and reconnect when closed; a node gets in before they time out."""
    for name, number in (("_MOST", 20), ("_MOST_OF_ONE", 4), ("_ACCEPTED_AT_ONCE", 4)):
        monkeypatch.setattr(f"meshrun.rendezvous.unauthenticated.{name}", number)
    coordinator = parties.coordinator(2)

    def connect(number: int) -> socket.socket:
        outsider = parties.outsider(source=f"127.0.1.{1 + number % origins}")
        outsider.setblocking(False)
        return outsider

    unauthenticated = [connect(number) for number in range(60)]
    parties.turn(3)
    began_ns = parties.clock.now_ns
    parties.participant(info("node1"))

    def have_joined() -> bool:
        if coordinator.received(AllJoined):
            return True
        for number, each in enumerate(unauthenticated):
            if _is_closed(each):
                unauthenticated[number] = connect(number)
        parties.clock.pass_s(0.02)
        return parties.clock.now_ns - began_ns > 9 * S

    parties.until(have_joined)

    assert coordinator.received(AllJoined)[0].hosts == ("node0", "node1")
    assert len(coordinator.notes) <= 21


def test_nodes_that_wait_for_a_late_one_can_still_be_reached(parties: Parties) -> None:
    """Each leaves the port open that another tests once all have joined."""
    coordinator = parties.coordinator(3)
    early = parties.participant(info("node1"), nnodes=3)
    parties.pass_s(40)
    late = parties.participant(info("node2"), nnodes=3)
    everyone = [coordinator, early, late]
    parties.until(lambda: all(party.received(AllJoined) for party in everyone))
    parties.pass_s(12)

    assert not any("cannot reach" in note for party in everyone for note in party.notes)


def test_a_node_that_sends_a_byte_at_a_time_counts_as_silent(parties: Parties) -> None:
    """Only complete messages count."""
    coordinator = parties.coordinator(3, node_timeout_s=8.0)
    connection, writer = _authenticated(parties)
    connection.sendall(writer.frame(encode(info("node1"))))
    slow = writer.frame(encode(Waiting(text="x" * 100)))
    for byte in slow[:30]:
        if _is_closed(connection):
            break
        connection.sendall(bytes([byte]))
        parties.pass_s(1)

    assert _is_closed(connection)
    assert not coordinator.received(JoinFailed)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("second", [info("node1", 2), info("node2", 1), WITHDRAW])
def test_a_connection_that_joins_twice_is_closed(
    parties: Parties, second: Message, at_once: bool
) -> None:
    """And does not keep its place."""
    coordinator = parties.coordinator(3, last_call_s=60.0, least_nodes=3)
    connection, writer = _authenticated(parties)
    first = writer.frame(encode(info("node1", 1)))
    if not at_once:
        connection.sendall(first)
        parties.pass_s(1)
        first = b""
    connection.sendall(first + writer.frame(encode(second)) + writer.frame(encode(second)))
    parties.until(lambda: _is_closed(connection))
    others = [parties.participant(info(f"node{rank}", rank), nnodes=3) for rank in (1, 2)]
    parties.until(lambda: all(other.received(AllJoined) for other in others))

    assert coordinator.received(AllJoined)[0].hosts == ("node0", "node1", "node2")


def _authenticated(parties: Parties) -> tuple[socket.socket, FrameWriter]:
    """Return a connection that has proved that it knows the secret, and its frame writer."""
    connection = parties.outsider()
    handshake = ParticipantHandshake(SECRET)
    connection.sendall(handshake.answer(_line(parties, connection)))
    key = handshake.finish(_line(parties, connection))
    return connection, FrameWriter(key, "participant")


@pytest.mark.parametrize("begins", [b"", b"\x00\x00"], ids=["nothing", "a part"])
def test_a_first_message_that_does_not_arrive_is_reported(parties: Parties, begins: bytes) -> None:
    """The network may lose all large packets; both sides report it, and others are admitted."""
    coordinator = parties.coordinator(2)
    connection, _ = _authenticated(parties)
    connection.sendall(begins)
    parties.pass_s(12)
    right = parties.participant(info("node1"))
    parties.until(lambda: right.received(AllJoined))

    why = "its first long message did not arrive within 10 s; check that the network carries large"
    assert [why in note for note in coordinator.notes].count(True) == 1
    assert why.encode() in connection.recv(4096)


def test_a_first_message_that_never_arrives_is_the_hint(parties: Parties) -> None:
    """At the end, its sender, whose next attempt is under way, is told that there is no launch."""
    coordinator = parties.coordinator(2, timeout_s=15.0)
    _authenticated(parties)
    parties.pass_s(12)
    connection, _ = _authenticated(parties)
    parties.until(lambda: parties.pass_s(1) or coordinator.received(JoinFailed))
    parties.remove(coordinator)
    error = coordinator.received(JoinFailed)[0].error

    assert "127.0.0.1 has connected, but its first long message" in str(error.hint)
    assert error.message.encode() in connection.recv(4096)


def test_a_crowd_of_participants_does_not_wait_for_a_heartbeat(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than may be unauthenticated at once: as soon as one has joined, the next is accepted."""
    monkeypatch.setattr("meshrun.rendezvous.unauthenticated._MOST", 2)
    coordinator = parties.coordinator(9)
    parties.turn()
    beat_ns = coordinator.reactor.next_ns
    assert beat_ns is not None
    for number in range(1, 9):
        parties.participant(info(f"node{number}"), nnodes=9)
    parties.until(lambda: coordinator.received(AllJoined) or parties.clock.now_ns >= beat_ns)

    assert coordinator.received(AllJoined)


def test_a_participant_that_sends_slowly_is_admitted(parties: Parties) -> None:
    """One byte at a time, during the handshake."""
    coordinator = parties.coordinator(2)
    connection = parties.outsider()
    greeting = _line(parties, connection)
    handshake = ParticipantHandshake(SECRET)
    for byte in handshake.answer(greeting):
        connection.sendall(bytes([byte]))
        parties.turn()
    handshake.finish(_line(parties, connection))

    assert not any("was rejected" in note for note in coordinator.notes)


def _line(parties: Parties, connection: socket.socket) -> bytes:
    connection.setblocking(False)
    got = bytearray()

    def look() -> bool:
        with suppress(BlockingIOError):
            while not got.endswith(b"\n") and (byte := connection.recv(1)):
                got.extend(byte)
        return got.endswith(b"\n")

    parties.until(look)
    return bytes(got)


def test_a_replayed_handshake_is_not_admitted(parties: Parties) -> None:
    """An eavesdropper cannot use what a participant has sent."""
    coordinator = parties.coordinator(2)
    first = parties.outsider()
    sent = ParticipantHandshake(SECRET).answer(_line(parties, first))
    first.sendall(sent)
    _line(parties, first)
    parties.outsider(sent)
    parties.until(lambda: coordinator.notes)

    assert coordinator.notes[0].startswith("127.0.0.1 was rejected: it belongs to another launch")


def test_connections_that_are_reset_are_no_further_host(parties: Parties) -> None:
    """Their address is unknown, and one outsider must not count as two missing nodes."""
    coordinator = parties.coordinator(3)
    for _ in range(4):
        parties.outsider(WRONG_PROOF)
        outsider = parties.outsider(WRONG_PROOF)
        outsider.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        outsider.close()
        parties.pass_s(2)

    (note,) = (note for note in coordinator.notes if "was rejected" in note)
    assert note.startswith("127.0.0.1 was rejected: it belongs to another launch")
    assert not coordinator.received(JoinFailed)


def test_a_participant_that_vanishes_may_join_again(parties: Parties) -> None:
    """Its rank is free again if not all nodes have joined yet."""
    coordinator = parties.coordinator(3)
    first = parties.participant(info("node1", 1), nnodes=3)
    parties.until(lambda: _is_open(first))
    parties.turn(5)
    parties.remove(first)
    parties.turn(5)
    for rank in (1, 2):
        parties.participant(info(f"node{rank}", rank), nnodes=3)
    parties.until(lambda: coordinator.received(AllJoined))

    assert coordinator.received(AllJoined)[0].hosts == ("node0", "node1", "node2")
    assert not coordinator.received(JoinFailed)


def _is_open(party: object) -> bool:
    connection = party.side._connection  # type: ignore[attr-defined]
    return connection is not None and connection.is_open


def test_a_participant_that_falls_silent_is_not_counted(parties: Parties) -> None:
    """It may have been cut off; the coordinator reports again which nodes are missing."""
    coordinator = parties.coordinator(3, node_timeout_s=4.0)
    silent = parties.participant(info("node1"), nnodes=3)
    parties.until(lambda: _is_open(silent))
    parties.turn(5)
    parties.all.remove(silent)  # it gets no more turns, and its socket stays open
    parties.pass_s(12)

    assert coordinator.notes[-1].startswith("waiting at 127.0.0.1:")
    assert "1 of 3 nodes joined" in coordinator.notes[-1]
    silent.close()


@pytest.mark.parametrize("rank", [1, None])
def test_a_host_that_was_cut_off_may_join_again(parties: Parties, rank: int | None) -> None:
    """Its earlier connection is still open here, but silent; it does not count as two nodes."""
    coordinator = parties.coordinator(3)
    cut = parties.participant(info("node1", rank), nnodes=3)
    parties.until(lambda: _is_open(cut))
    parties.turn(5)
    parties.all.remove(cut)
    parties.pass_s(5)
    parties.participant(info("node1", rank), nnodes=3)
    parties.until(lambda: _is_open(parties.all[-1]))
    parties.turn(5)
    assert not coordinator.events
    parties.participant(info("node2"), nnodes=3)
    parties.until(lambda: coordinator.received(AllJoined))

    assert coordinator.received(AllJoined)[0].hosts == ("node0", "node1", "node2")
    cut.close()


def test_two_launchers_on_one_host_are_two_nodes(parties: Parties) -> None:
    """Both of them send heartbeats."""
    coordinator = parties.coordinator(3)
    first = parties.participant(info("node1"), nnodes=3)
    parties.until(lambda: _is_open(first))
    parties.pass_s(5)
    parties.participant(info("node1"), nnodes=3)
    parties.until(lambda: coordinator.received(AllJoined))

    assert coordinator.received(AllJoined)[0].hosts == ("node0", "node1", "node1")


def test_a_difference_ends_the_meeting_on_both_sides(parties: Parties) -> None:
    """With the same message and exit code."""
    coordinator = parties.coordinator(2, settings={"--mesh": "dp=2"})
    participant = parties.participant(info("node1", **{"--mesh": "dp=4"}))
    parties.until(lambda: coordinator.received(JoinFailed) and participant.received(JoinFailed))
    errors = [party.received(JoinFailed)[0].error for party in (coordinator, participant)]

    assert {error.message for error in errors} == {
        "--mesh is dp=4 on node1, but dp=2 on node0 (node 0)"
    }
    assert {error.exit_code for error in errors} == {2}
    assert len(coordinator.received(JoinFailed)) == 1


def test_waiting_nodes_learn_which_are_missing(parties: Parties) -> None:
    """Every few seconds; the coordinator shows the command for the others once."""
    coordinator = parties.coordinator(
        3, join_command="meshrun --rdzv-endpoint ENDPOINT x.py ENDPOINT"
    )
    participant = parties.participant(info("node1", 1), nnodes=3)
    parties.pass_s(14)
    waiting = [note for note in coordinator.notes if note.startswith("waiting at ")]
    command = f"meshrun --rdzv-endpoint 127.0.0.1:{parties.port} x.py ENDPOINT"

    assert len(waiting) == 3
    assert "2 of 3 nodes joined; missing: node 2" in waiting[-1]
    assert coordinator.notes.count(f"run on every other node: {command}") == 1
    assert [note for note in participant.notes if note.startswith("waiting at ")] == waiting


def test_the_meeting_ends_at_the_timeout(parties: Parties) -> None:
    """The coordinator's, for all nodes, with the missing nodes and possible causes."""
    coordinator = parties.coordinator(3, timeout_s=20.0)
    participant = parties.participant(info("node1", 1), nnodes=3, timeout_s=15.0)
    parties.pass_s(22)
    errors = [party.received(JoinFailed)[0].error for party in (coordinator, participant)]

    assert {error.message for error in errors} == {
        "after 20 s, 2 of 3 nodes joined; missing: node 2"
    }
    assert {error.exit_code for error in errors} == {69}
    assert "--rdzv-id and MESHRUN_SECRET" in str(errors[0].hint)


def test_a_surplus_node_is_rejected(parties: Parties) -> None:
    """Once all nodes have joined, no other is admitted, and the launch continues."""
    coordinator = parties.coordinator(2)
    participants = [parties.participant(info(f"node{n}")) for n in (1, 2)]
    parties.until(lambda: coordinator.received(AllJoined))
    parties.pass_s(5)
    joined = [party for party in participants if party.received(AllJoined)]

    assert len(joined) == 1
    assert not any(party.received(JoinFailed) for party in (coordinator, *joined))


def test_a_coordinator_that_ends_notifies_waiting_nodes(parties: Parties) -> None:
    """They do not wait for their own timeout."""
    coordinator = parties.coordinator(3)
    participant = parties.participant(info("node1", 1), nnodes=3)
    parties.until(lambda: _is_open(participant))
    parties.turn(5)
    parties.outsider()
    parties.turn(5)
    parties.remove(coordinator)
    parties.until(lambda: participant.received(JoinFailed))

    error = participant.received(JoinFailed)[0].error
    assert error.message == "node0 exited before all nodes had joined"
