"""Sockets to which the kernel admits only some addresses."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from meshrun.host.network import listen_for
from meshrun.protocol.events import AllJoined
from meshrun.rendezvous.membership import fit_without_mesh
from tests.parties import Parties, info
from tests.unit.test_elastic_nodes import fit

STRANGER = "127.0.0.9"
"""An address of this machine that no interface lists, to stand for another machine's."""


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Close these resources at the end of the test."""
    with ExitStack() as held:
        yield held


def is_waiting(listener: socket.socket) -> bool:
    """Return whether a connection is waiting to be accepted."""
    return bool(select.select([listener], [], [], 0)[0])


def connect(held: ExitStack, place: tuple[str, int], source: str) -> bool:
    """Connect from an address; return whether it worked, which on loopback is known at once."""
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    connection = held.enter_context(closing(socket.socket(family)))
    connection.bind((source, 0))
    connection.setblocking(False)
    connection.connect_ex(place)
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("bound", "source", "admitted", "gets_in"),
    [
        ("127.0.0.1", STRANGER, ["127.0.0.1"], False),
        ("127.0.0.1", STRANGER, [], False),
        ("127.0.0.1", STRANGER, ["::1", "10.0.0.1", STRANGER], True),
        ("127.0.0.1", "127.0.0.1", [f"10.0.1.{n}" for n in range(256)], False),
        ("127.0.0.1", "127.0.0.1",
         [*(f"10.0.{n}.{n}" for n in range(256)), "127.0.0.1"], True),
        ("0.0.0.0", STRANGER, ["127.0.0.1"], False),
        ("::1", "::1", ["::1"], True),
        ("::1", "::1", ["fe80::1%eth0", "fd00::2", "::1"], True),
        ("::1", "::1", ["::2", "fd00::1", "127.0.0.1"], False),
        ("::", STRANGER, ["127.0.0.1", "::1"], False),
        ("::", STRANGER, ["::ffff:127.0.0.9"], True),
    ],
)  # fmt: skip
def test_only_these_addresses_get_in(
    held: ExitStack, bound: str, source: str, admitted: list[str], gets_in: bool
) -> None:
    """In both families, for any number of addresses, including the last one."""
    try:
        listener, sink = listen_for(admitted, bound)
    except Exception as error:
        if ":" in bound:
            pytest.skip(f"no IPv6 here: {error}")
        raise
    held.callback(listener.close)
    held.callback(sink.close)
    place = ("::1" if bound == source == "::1" else "127.0.0.1", listener.getsockname()[1])

    assert connect(held, place, source)
    assert is_waiting(listener) == gets_in
    assert is_waiting(sink) != gets_in


@pytest.mark.parametrize("is_elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("is_open", [False, True], ids=["restricted", "open"])
def test_the_ranks_store_is_for_nodes_of_the_launch(
    parties: Parties, held: ExitStack, monkeypatch: pytest.MonkeyPatch, is_elastic: bool,
    is_open: bool,
) -> None:  # fmt: skip
    """As soon as a node has received its place."""
    if is_open:
        monkeypatch.setenv("MESHRUN_OPEN_STORE", "1")
    changes = {"least_nodes": 1, "return_s": 60.0} if is_elastic else {}
    coordinator = parties.coordinator(2, fit=fit if is_elastic else fit_without_mesh, **changes)
    participant = parties.participant(info("node1", 1), **changes)
    parties.until(lambda: coordinator.received(AllJoined) and participant.received(AllJoined))
    joined = participant.received(AllJoined)[0]
    place = (joined.store_address, joined.store_port)

    store = coordinator.side.store_listener

    assert connect(held, place, STRANGER)
    assert is_waiting(store) == is_open
    assert connect(held, place, "127.0.0.1")
    assert is_waiting(store)
    assert coordinator.notes == []
