"""Which node is node 0: by the endpoint, its node rank, or torch's rendezvous."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from msgspec.structs import replace

from meshrun.host.network import listen_on
from meshrun.host.reactor import Reactor
from meshrun.protocol.events import AllJoined, FromNodes, JoinFailed
from meshrun.protocol.zygote_messages import (
    Negotiate,
    Negotiated,
    NegotiationFailed,
    NegotiationWaits,
    NodeInfo,
)
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.peers import Peers
from meshrun.rendezvous.this_node import ThisNode
from meshrun.supervisor.node_link import Linger
from tests.kit import wait_until
from tests.parties import SECRET, S, info
from tests.plans import config_of


class Launcher:
    """The peers of one launcher, with its notes, events and orders to torch's rendezvous."""

    def __init__(self, name: str, **config: Any) -> None:
        self.reactor = Reactor()
        self.notes: list[str] = []
        self.events: list[FromNodes] = []
        self.orders: list[Negotiate] = []
        node = ThisNode(
            config=config_of(**{"is_secret": True, **config}),
            info=info(name, config.get("node_rank")),
            secret=SECRET,
            hub=Hub(self.reactor, self.notes.append),
        )
        self.peers = Peers(node, negotiate=self.orders.append)

    def turn(self) -> None:
        self.reactor.turn(most_s=0)
        self.events += self.peers.events
        self.peers.events.clear()

    def received(self, kind: type[Any]) -> Any:
        return next((each for each in self.events if isinstance(each, kind)), None)

    @property
    def place(self) -> tuple[str, int] | None:
        """The address on which it listens, if it is node 0."""
        return self.peers.listener.getsockname()[:2] if self.peers.listener else None


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    """Give a list whose launchers are closed after the test, participants first."""
    made: list[Launcher] = []
    yield made
    for each in sorted(made, key=lambda launcher: launcher.place is not None):
        each.peers.close()
        each.reactor.close()


def children() -> set[int]:
    """Return the running children of this process, which earlier tests may have had."""
    found = psutil.Process().children()
    return {each.pid for each in found if each.status() != psutil.STATUS_ZOMBIE}


def until(launchers: list[Launcher], kind: type[Any]) -> None:
    """Take turns until each launcher has received such an event."""

    def look() -> bool:
        for each in launchers:
            each.turn()
        return all(each.received(kind) for each in launchers)

    wait_until(look, lambda: str([(each.notes, each.events) for each in launchers]))


def free_port() -> int:
    with closing(listen_on("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_the_launcher_with_the_endpoint_is_first(launchers: list[Launcher]) -> None:
    """The other launcher of this machine finds the port taken, and joins."""
    port = free_port()
    for name in ("a", "b"):
        launchers.append(Launcher(name, host="127.0.0.1", port=port, is_secret=False))
        wait_until(lambda: _turned(launchers), lambda: str(launchers[0].notes))
    until(launchers, AllJoined)

    assert [each.received(AllJoined).node_rank for each in launchers] == [0, 1]
    assert [each.received(AllJoined).hosts for each in launchers] == [("a", "b")] * 2
    told = (
        f"no secret is set: anyone who can reach 127.0.0.1:{port} and knows this command can join"
    )
    assert launchers[0].notes[0].startswith(told)
    assert not any("secret" in note for note in launchers[1].notes)


def _turned(launchers: list[Launcher]) -> bool:
    for each in launchers:
        each.turn()
    return launchers[0].place is not None


@pytest.mark.parametrize("node_ranks", [(None, None), (0, 1)])
def test_nodes_share_a_machine_whose_name_is_a_loopback_address(
    launchers: list[Launcher], monkeypatch: pytest.MonkeyPatch, node_ranks: Sequence[int | None]
) -> None:
    """As on Debian; node 0 listens on another address, where the second one looks."""
    port = free_port()
    monkeypatch.setattr("meshrun.host.network.look_up", lambda _: ["127.0.1.1"])
    monkeypatch.setattr("socket.gethostname", lambda: "node0")
    for rank in node_ranks:
        launchers.append(Launcher("node0", host="node0", port=port, node_rank=rank))
        wait_until(lambda: _turned(launchers), lambda: str(launchers[0].notes))
    until(launchers, AllJoined)

    assert [each.received(AllJoined).node_rank for each in launchers] == [0, 1]


def test_a_node_rank_overrides_the_address(launchers: list[Launcher]) -> None:
    """Node 1 on the endpoint's machine is not the coordinator."""
    port = free_port()
    for rank in (1, 0):
        launchers.append(Launcher(f"n{rank}", host="127.0.0.1", port=port, node_rank=rank))
    until(launchers, AllJoined)

    assert [each.received(AllJoined).node_rank for each in launchers] == [1, 0]


def test_a_first_node_without_an_endpoint_listens_on_an_address(launchers: list[Launcher]) -> None:
    """On one that others can reach, or on all."""
    launchers.append(Launcher("a"))

    assert launchers[0].place is not None
    assert not launchers[0].place[0].startswith("127.")


def test_a_first_node_whose_port_is_taken_gets_an_error(launchers: list[Launcher]) -> None:
    """It does not wait for an answer from what listens there."""
    with closing(listen_on("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launchers.append(Launcher("a", host="127.0.0.1", port=port, node_rank=0))
        until(launchers, JoinFailed)

    assert launchers[0].received(JoinFailed).error.exit_code == 71
    assert str(port) in launchers[0].received(JoinFailed).error.message


def node_0_elsewhere(launchers: list[Launcher], name: str, port: int, **config: Any) -> Launcher:
    """Add a node 0 that does not have the endpoint's address and listens on another."""
    config = {"host": "127.0.0.1", "node_rank": 0, "local_addr": "127.0.0.2", **config}
    launchers.append(launcher := Launcher(name, port=port, **config))
    wait_until(lambda: _listens(launcher), lambda: str(launcher.notes))
    return launcher


def _listens(launcher: Launcher) -> bool:
    launcher.turn()
    return launcher.place is not None


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's addresses, as if they were another machine's."""
    monkeypatch.setattr("meshrun.rendezvous.endpoint.own_addresses", dict)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("early", ["impostor", "real"])
@pytest.mark.parametrize(
    "why",
    [
        {},
        {"node_rank": None, "backend": "c10d", "is_host": True},
        {"node_rank": None, "host": "localhost"},  # which is also the name of both machines
    ],
    ids=["rank", "c10d", "name"],
)
def test_two_first_nodes_are_an_error(
    launchers: list[Launcher], early: str, why: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order; both errors name both nodes."""
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    port = free_port()
    for name in (early, *({"impostor", "real"} - {early})):
        address = "127.0.0.1" if name == "real" else "127.0.0.2"
        node_0_elsewhere(launchers, name, port, **{"local_addr": address, **why})
    until(launchers, JoinFailed)

    for each in launchers:
        error = each.received(JoinFailed).error
        assert error.message == "real and impostor are both node 0"
        assert error.exit_code == 2


@pytest.mark.usefixtures("elsewhere")
def test_a_first_node_that_reaches_itself_continues(launchers: list[Launcher]) -> None:
    """The endpoint's address is translated to this node, which does not have it."""
    port = free_port()
    node_0_elsewhere(launchers, "a", port, local_addr="127.0.0.1")
    launchers.append(Launcher("b", host="127.0.0.1", port=port, node_rank=1))
    until(launchers, AllJoined)

    assert [each.received(AllJoined).hosts for each in launchers] == [("a", "b")] * 2


# ---- torch's rendezvous -------------------------------------------------------------------------

FOUND = Negotiated(
    node_rank=0, nnodes=2,
    coordinator=NodeInfo(host="a", address="127.0.0.1", port=0, secret="drawn"),
)  # fmt: skip


def listening(order: Negotiate) -> NodeInfo:
    """Return where the launcher with an order listens."""
    return NodeInfo(host=order.host, address=order.address, port=order.port, secret="drawn")


def negotiating(launchers: list[Launcher], name: str, port: int, **config: Any) -> Launcher:
    """Add a launcher that has requested torch's rendezvous."""
    launcher = Launcher(name, backend="etcd", host="127.0.0.1", port=port, **config)
    launchers.append(launcher)
    wait_until(lambda: _asked(launcher), lambda: str(launcher.notes))
    return launcher


def _asked(launcher: Launcher) -> bool:
    launcher.turn()
    return bool(launcher.orders)


def test_torch_finds_the_first_node_and_the_launchers_meet_there(
    launchers: list[Launcher],
) -> None:
    """Each launcher listens on its own port until then."""
    port = free_port()
    first = negotiating(launchers, "a", port, run_id="j")
    second = negotiating(launchers, "b", port, run_id="j")
    order = first.orders[0]
    assert (order.endpoint_port, order.run_id, order.nnodes) == (port, "j", 2)
    found = replace(FOUND, coordinator=listening(order))
    first.peers.receive(found)
    second.peers.receive(replace(found, node_rank=1))
    until(launchers, AllJoined)

    assert second.received(AllJoined).store_address == order.address
    assert second.received(AllJoined).hosts == ("a", "b")


def test_the_random_value_of_torchs_rendezvous_is_part_of_the_secret(
    launchers: list[Launcher],
) -> None:
    """A launcher of another rendezvous is rejected."""
    port = free_port()
    first = negotiating(launchers, "a", port)
    second = negotiating(launchers, "b", port)
    order = first.orders[0]
    found = replace(FOUND, coordinator=listening(order))
    first.peers.receive(found)
    other = replace(found.coordinator, secret="another")
    second.peers.receive(replace(found, node_rank=1, coordinator=other))

    def look() -> bool:
        for each in launchers:
            each.turn()
        return any("was rejected" in note for note in first.notes)

    wait_until(look, lambda: str(first.notes))
    assert not first.received(AllJoined)


def test_a_failed_rendezvous_of_torch_is_reported(launchers: list[Launcher]) -> None:
    """First a note says what it waits for, then an error why it failed."""
    first = negotiating(launchers, "a", free_port())
    first.peers.receive(NegotiationWaits(text="1 of 2 nodes joined\x1b[2J"))
    first.peers.receive(NegotiationFailed(text="after 600 s: 1 of 2 nodes joined"))
    until([first], JoinFailed)

    assert first.notes == [r"1 of 2 nodes joined\x1b[2J"]  # others write to torch's store
    error = first.received(JoinFailed).error
    assert error.exit_code == 69
    assert error.message.startswith("etcd at 127.0.0.1:")
    assert error.message.endswith(": after 600 s: 1 of 2 nodes joined")


def test_torchs_rendezvous_starts_again_in_a_new_process(launchers: list[Launcher]) -> None:
    """The zygote may have to be restarted; the address stays."""
    first = negotiating(launchers, "a", free_port())
    first.peers.start_negotiation()

    assert len(first.orders) == 2
    assert first.orders[0] == first.orders[1]
    first.peers.receive(replace(FOUND, nnodes=1))
    first.peers.start_negotiation()
    assert len(first.orders) == 2


def test_a_name_service_that_never_answers_is_reported(
    launchers: list[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver may hang; the time limit applies, and the lookup is stopped."""
    monkeypatch.setattr("meshrun.host.network.look_up", lambda _: signal.pause())
    before = children()
    launchers.append(first := Launcher("a", host="node0", port=free_port(), timeout_s=0.2))
    until([first], JoinFailed)

    error = first.received(JoinFailed).error
    assert re.fullmatch(
        r"the name `node0` does not resolve after \d+ s: the name service has not answered yet",
        error.message,
    )
    assert "--rdzv-endpoint ADDRESS:PORT" in error.hint
    assert first.peers.all_notified  # as far as possible: it does not know them
    wait_until(lambda: children() <= before, lambda: "the lookup to end")


def test_a_node_that_is_not_first_connects_to_the_endpoint(launchers: list[Launcher]) -> None:
    """It looks for node 0 there."""
    with closing(socket.socket()) as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        launchers.append(
            Launcher("b", host="127.0.0.1", port=reserved.getsockname()[1], node_rank=1)
        )
        wait_until(lambda: _noted(launchers[0]), lambda: str(launchers[0].notes))

    assert "Connection refused" in launchers[0].notes[0]
    assert launchers[0].place is None


def _noted(launcher: Launcher) -> bool:
    launcher.turn()
    return bool(launcher.notes)


@pytest.mark.parametrize(("import_s", "stays_s"), [(0, 4), (9, 13), (100, 64)])
def test_the_time_to_tell_others_counts_from_the_import_of_torch(
    import_s: int, stays_s: int
) -> None:
    """On a slow machine, the others would otherwise not learn that this node withdraws."""
    now_ns = 0
    peers = SimpleNamespace(all_notified=False, imports_torch=True)
    with Reactor(clock_ns=lambda: now_ns) as reactor:
        linger = Linger(cast("Peers", peers), "why", 4.0, lambda _: None, reactor)
        while not linger.is_over:
            peers.imports_torch = now_ns < import_s * S
            reactor.turn(most_s=0)
            now_ns += S // 10

    assert stays_s - 0.5 < now_ns / S < stays_s + 0.5
