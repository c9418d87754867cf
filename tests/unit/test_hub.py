"""What a launcher's connections share: deadlines and the interval of heartbeats."""

from __future__ import annotations

import select
import socket
from contextlib import closing

import pytest

from meshrun.host.network import listen_on
from meshrun.host.reactor import Reactor
from meshrun.rendezvous.connection import Connection, beat_s
from meshrun.rendezvous.frames import FrameWriter
from meshrun.rendezvous.handshake import CoordinatorHandshake, ParticipantHandshake
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.messages import Beat, Waiting, encode
from tests.kit import wait_until
from tests.parties import SECRET, Clock


def test_lost_time_does_not_count_against_a_deadline() -> None:
    """Time lost before a deadline begins does not extend it."""
    with Reactor() as reactor:
        hub = Hub(reactor, note=lambda _: None)
        first = hub.deadline(60)
        reactor.skip(50 * 10**9)
        second = hub.deadline(60)

    assert round(second.waited_s - first.waited_s) == 50


@pytest.mark.parametrize(
    ("nnodes", "timeout_s", "expected"),
    [(2, 30, 1), (500, 30, 1), (1000, 30, 2), (10_000, 30, 7.5), (10_000, 4, 1), (2000, 300, 4)],
)
def test_how_often_nodes_send_heartbeats(nnodes: int, timeout_s: float, expected: float) -> None:
    """Each second; with thousands of nodes more rarely, but several times within the timeout."""
    assert beat_s(nnodes, timeout_s) == expected


def test_a_long_message_that_is_arriving_is_no_silence() -> None:
    """A slow link may carry a traceback for longer than the node timeout."""
    clock = Clock()
    with listen_on("127.0.0.1", 0) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with Reactor(clock_ns=clock) as reactor, closing(theirs):
        coordinator = Connection(ours, CoordinatorHandshake(SECRET), Hub(reactor, note=str))
        participant = ParticipantHandshake(SECRET)
        theirs.sendall(participant.answer(theirs.recv(4096)))
        wait_until(lambda: coordinator.receive() or coordinator.is_open, lambda: "no proof")
        key = participant.finish(theirs.recv(4096))
        frame = FrameWriter(key, "participant").frame(encode(Waiting(text="x" * 1500)))
        silent = []
        for part in (frame[:500], frame[500:1000], frame[1000:]):
            theirs.sendall(part)
            select.select([ours], [], [])
            clock.pass_s(8)
            received = coordinator.receive()
            silent.append(coordinator.time_out_if_silent(10))
        coordinator.close("done")

    assert silent == ["", "", ""]
    assert [type(each) for each in received] == [Waiting]


@pytest.mark.parametrize(("interval_s", "number"), [(5, 12), (1.5, 30)])
def test_one_way_is_enough_where_heartbeats_are_rare(
    interval_s: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a participant knows the coordinator's clock, it only answers heartbeats."""
    clock = Clock()
    with listen_on("127.0.0.1", 0) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    reactor = Reactor(clock_ns=clock)
    hubs = [Hub(reactor, note=str) for _ in range(2)]
    coordinator = Connection(ours, CoordinatorHandshake(SECRET), hubs[0], beat_s=interval_s)
    participant = Connection(theirs, ParticipantHandshake(SECRET), hubs[1], beat_s=interval_s)
    hubs[1].reported_idle_s = 3.0
    received: dict[Connection, list[Beat]] = {coordinator: [], participant: []}
    take_beat = Connection._take_beat

    def record(connection: Connection, beat: Beat) -> None:
        received[connection].append(beat)
        take_beat(connection, beat)

    monkeypatch.setattr(Connection, "_take_beat", record)
    for _ in range(60):
        for each in (coordinator, participant):
            assert each.receive() == []
        clock.pass_s(1)
        reactor.call_due()
    own = {
        each: [beat for beat in beats if beat.echo_ns is None] for each, beats in received.items()
    }

    assert abs(len(own[participant]) - number) <= 1  # from the coordinator, at whole seconds
    assert 2 <= len(own[coordinator]) <= 4
    assert (coordinator.closed, participant.closed) == (None, None)
    assert (
        received[coordinator][-1].idle_s == 3.0
    )  # carried by the answer, as there is no heartbeat
    for each in (coordinator, participant):
        each.close("done")
    assert not reactor.watched
    assert not any(hub.connections for hub in hubs)
    reactor.close()
