"""Packets on the control sockets."""

import os
import select
import socket
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.host.network import packet_pair
from meshrun.lifecycle.state import State
from meshrun.protocol import codec
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.zygote_messages import Checked, Exit, RankBeat, StartRank
from meshrun.supervisor.loop import Loop
from meshrun.supervisor.zygote_client import ZygoteClient

texts = st.text(max_size=60)


@given(
    st.builds(
        RankRaised, rank=st.integers(0, 2**31), at_ns=st.integers(0, 2**62), kind=st.just("E"),
        message=texts, traceback=texts, shown=st.booleans(),
    )
)  # fmt: skip
def test_a_message_survives_its_packet(event: RankRaised) -> None:
    """Whatever characters its text has."""
    assert codec.decode(codec.encode(event)) == event


def test_a_text_of_another_class_survives_its_packet() -> None:
    """As an exception's may be: ``__str__`` may return an object of any subclass of ``str``."""

    class Text(str):
        __slots__ = ()

    event = RankRaised(rank=0, at_ns=0, kind="E", message=Text("lost"), traceback="", shown=False)

    assert codec.decode(codec.encode(event)) == event


def test_an_order_survives_its_packet() -> None:
    """With its dictionaries and lists."""
    order = StartRank(
        rank=3,
        environment={"A": "b"},
        coordinate=[1, 2],
        local_rank=3,
        lazy=False,
        cpus=[0],
        imports=[],
    )

    assert codec.decode(codec.encode(order)) == order


@pytest.mark.parametrize("character", ["x", "\0", "\u2603", "\U0001f600", "\ud800"])
def test_a_huge_text_still_fits_a_packet(character: str) -> None:
    """A traceback of megabytes loses its middle and keeps its ends."""
    text = f"begin{character * 1_000_000}end"
    event = RankRaised(rank=0, at_ns=0, kind="E", message=text, traceback=text, shown=False)
    packet = codec.encode(event)
    decoded = codec.decode(packet)

    assert len(packet) <= codec.PACKET_BYTES
    assert isinstance(decoded, RankRaised)
    assert decoded.traceback.startswith("begin")
    assert decoded.traceback.endswith("end")


@given(st.binary(max_size=200))
def test_garbage_is_rejected(packet: bytes) -> None:
    """With a WireError and nothing else."""
    with pytest.raises(codec.WireError):
        codec.decode(packet)


@pytest.mark.parametrize(
    "packet",
    [
        b'["RankExited", {"rank": "0", "pid": 1, "wait_status": 0, "at_ns": 1}]',
        b'["RankExited", {"rank": 0}]',
        b'["RankExited", {"rank": true, "pid": 1, "wait_status": 0, "at_ns": 1}]',
        b'["os.system", {}]',
        b'["StartRank", {"rank":0,"environment":[],"unset":[],"coordinate":[]}]',
        b'["SignalRanks", {"ranks": [0, "1"], "signum": 15, "whole_group": false}]',
        b'["SignalRanks", {"ranks": [0, true], "signum": 15, "whole_group": false}]',
        b"[" * 100_000,
    ],
)
def test_a_message_of_the_wrong_shape_is_rejected(packet: bytes) -> None:
    """Fields and their types are checked."""
    with pytest.raises(codec.WireError):
        codec.decode(packet)


def test_what_a_check_has_found_is_printable() -> None:
    """Some of its words come from other machines."""
    sent = Checked(rank=0, findings=["\x1b[2J"], hosts=["a\n"], speeds="\a", seconds=1.0, at_ns=0)
    found = codec.decode(codec.encode(sent))

    assert isinstance(found, Checked)
    assert "".join((*found.findings, *found.hosts, found.speeds)).isprintable()


def test_every_message_has_its_own_name() -> None:
    """Packets name their type, so two types of one name could not be distinguished."""
    kinds = get_args(codec.Message)

    assert len({kind.__name__ for kind in kinds}) == len(kinds)


def test_the_end_of_the_last_reporter_wakes_nothing() -> None:
    """Or else the launcher would spin until the zygote has ended."""
    zygote = ZygoteClient.__new__(ZygoteClient)
    with zygote._new_sockets() as ends:
        reports = socket.socket(fileno=os.dup(ends[1]))
    with reports:
        reports.send(b"a report")
    zygote._barrier = -1
    assert select.select([zygote.reports], [], [], 0)[0]
    assert zygote.reports.recv(100) == b"a report"
    assert not select.select([zygote.reports], [], [], 0)[0]
    assert zygote.control.recv(100) == b""  # while the control socket does report its end
    zygote.close()


def test_reports_without_end_are_read_in_parts() -> None:
    """Each part has all that the socket holds, so that what came before a rank's end is in it."""
    report = codec.encode(RankBeat(rank=0, at_ns=0))
    ours, theirs = packet_pair()
    held = 0
    with ours, theirs, suppress(BlockingIOError):
        theirs.setblocking(False)
        while theirs.send(report):
            held += 1
    loop = Loop.__new__(Loop)
    zygote = SimpleNamespace(receive_report=lambda: codec.decode(report))
    loop._processes = SimpleNamespace(zygote=zygote)  # type: ignore[assignment]
    loop.state = State(shutdown_timeout_s=0.0, ranks={0: RankState()})
    read = sum(1 for _ in islice(loop._receive_reports(), 100_000))

    assert held < read < 100_000


def test_an_order_to_a_closed_zygote_is_ignored() -> None:
    """A second SIGTERM may arrive after the zygote's socket was closed."""
    zygote = ZygoteClient.__new__(ZygoteClient)
    zygote.control, theirs = packet_pair()
    with theirs:
        zygote.control.close()
        zygote.send(Exit(grace_s=0.0))
