"""Messages between launchers: encoded, decoded, and rejected if they are not valid."""

from __future__ import annotations

import base64
import json
import socket
import types
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct
from msgspec.structs import replace

from meshrun.host.network import listen_on
from meshrun.host.reactor import Reactor
from meshrun.layout import Layout
from meshrun.lifecycle.outcome import build_result
from meshrun.protocol.events import Event, LaunchOver, NextBegins, NodesEvent
from meshrun.protocol.generation import NodeOutcome
from meshrun.protocol.packing import Line, Time, convert
from meshrun.protocol.rank_end import RankExited
from meshrun.protocol.result import Timings
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.frames import LONGEST
from meshrun.rendezvous.handshake import CoordinatorHandshake, ParticipantHandshake
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.messages import (
    Cleared,
    Join,
    Message,
    MessageError,
    SharedWelcome,
    Waiting,
    Welcome,
    decode,
    encode,
)
from meshrun.rendezvous.participant import Participant
from meshrun.rendezvous.running_generation import RunningGeneration
from meshrun.rendezvous.this_node import ThisNode
from tests.histories import ENDED, GONE, READY
from tests.node_histories import COORDINATOR, COORDINATOR_ENDED, PARTICIPANT, play
from tests.parties import info
from tests.plans import config_of

TEXT = st.text(st.characters(codec="ascii", categories=("L", "N")), max_size=20)
ANY_TEXT = st.text(max_size=20)
PLAIN = st.none() | st.booleans() | st.integers() | ANY_TEXT
JSON = st.recursive(
    PLAIN | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
KINDS = get_args(Message)


SOME: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(), Time: st.integers(-(2**62), 2**62), str: TEXT, Line: TEXT,
    bool: st.booleans(), type(None): st.none(), Any: st.none(),
}  # fmt: skip
NODES = st.lists(st.tuples(TEXT, st.integers(0, 9)), min_size=1, max_size=4)


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return valid messages of a kind."""
    hints = get_type_hints(kind, include_extras=True)
    values = {name: some(hint) for name, hint in hints.items()}
    if kind is not Welcome:
        return st.builds(kind, **values)
    return NODES.flatmap(
        lambda nodes: st.builds(
            kind,
            **{
                **values,
                "node_rank": st.integers(0, len(nodes) - 1),
                "hosts": st.just(tuple(host for host, _ in nodes)),
                "nproc_per_node": st.just(tuple(count for _, count in nodes)),
                "nodes_per_domain": st.sampled_from([(), (len(nodes),), (1,) * len(nodes)]),
                "roles": st.just(tuple(host for host, _ in nodes)) | st.just(()),
                "previous": st.sampled_from([{}, Layout.parse("dp=2,tp=2").to_dict()]),
            },
        )
    )


def some(hint: Any) -> st.SearchStrategy[Any]:
    """Return values that fit an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return some_within(args[0], hint.__metadata__[0])
    if origin in (Union, types.UnionType):
        return st.one_of([some(each) for each in args])
    if origin in (list, tuple):
        return st.lists(some(args[0]), max_size=3).map(origin)
    if origin in (dict, Mapping):
        return st.dictionaries(some(args[0]), some(args[1]), max_size=3)
    if hint is not Any and (is_dataclass(hint) or issubclass(hint, Struct)):
        hints = get_type_hints(hint, include_extras=True)
        values = {name: some(each) for name, each in hints.items()}
        if hint is RankExited:
            values["wait_status"] = st.sampled_from([0, 256, 9, 139])
        return st.builds(hint, **values)
    return SOME[hint]


def some_within(hint: Any, bounds: Meta) -> st.SearchStrategy[Any]:
    most = {"min_value": bounds.ge, "max_value": bounds.le}
    return st.floats(**most) if hint is float else st.integers(**most)  # type: ignore[arg-type]


@given(message=st.one_of([any_of(kind) for kind in KINDS]))
def test_what_is_encoded_is_decoded(message: Message) -> None:
    """Every kind of message, with any values of its types."""
    assert decode(encode(message)) == message


@given(
    text=st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from([kind.__name__ for kind in KINDS]), JSON).map(
        lambda pair: json.dumps(pair).encode()
    )
)
def test_any_text_is_a_message_or_a_clear_error(text: bytes) -> None:
    """Decoding raises nothing but MessageError."""
    try:
        message = decode(text)
    except MessageError as error:
        assert str(error).startswith("not a message: ")
    else:
        assert decode(encode(message)) == message


@given(message=st.one_of([any_of(kind) for kind in KINDS]), data=st.data())
def test_a_field_of_another_type_is_refused(message: Message, data: st.DataObject) -> None:
    """Such as text in place of a number."""
    kind, values = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(values)))
    wrong = [1.5] if isinstance(values[name], dict | str | int | float) else {"a": [None]}
    if values[name] is None or isinstance(values[name], list):
        wrong = {"a": [None]}  # type: ignore[assignment]
    values[name] = wrong

    with pytest.raises(MessageError):
        decode(json.dumps([kind, values]).encode())


@pytest.mark.parametrize(
    "text",
    [
        b'["Join", {"host": "a", "node_rank": 0, "nproc": true, "settings": {}}]',
        b'["Leave", {"generation": 0}]',
        b'["Nothing", {}]',
        b'[["Leave"], {}]',
        b"[" * 100_000,
        b'["LaunchOver", {"exit_code": ' + b"9" * 5000 + b"}]",
    ],
    ids=["a bool for a number", "a missing field", "no kind", "a list for a kind",
         "deep", "a long number"],
)  # fmt: skip
def test_an_invalid_message_is_refused(text: bytes) -> None:
    with pytest.raises(MessageError):
        decode(text)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (
            Welcome(node_rank=1, hosts=("a", "b"), nproc_per_node=(1, 1), run_id="r", store_port=1),
            {"hosts": ["a", 7]},
        ),
        (
            Welcome(node_rank=1, hosts=("a", "b"), nproc_per_node=(1, 1), run_id="r", store_port=1),
            {"nproc_per_node": [1, "1"]},
        ),
        (Join(host="a", node_rank=None, nproc=1, settings={"--mesh": "dp=2"}),
         {"settings": {"--mesh": 2}}),
    ],
    ids=["a number among hosts", "text among counts", "a number for a setting"],
)  # fmt: skip
def test_items_of_lists_and_tables_are_checked_too(message: Message, wrong: dict[str, Any]) -> None:
    kind, values = json.loads(encode(message))

    with pytest.raises(MessageError):
        decode(json.dumps([kind, {**values, **wrong}]).encode())


WELCOME = {
    "node_rank": 1, "hosts": ["node0", "node1"], "nproc_per_node": [1, 1], "run_id": "r",
    "store_port": 1,
}  # fmt: skip
CAUSE = {"rank": 1, "description": "d", "raised": None, "ran_s": None, "at_ns": 1}
EXITED = {"rank": 1, "pid": 1, "wait_status": 9, "at_ns": 1}
BEGIN = {"generation": 1, "cause": CAUSE, "at_ns": 1}
OVER = {
    "exit_code": 0,
    "signum": None,
    "preempted": False,
    "headline": "",
    "generation": 0,
    "at_ns": 1,
}
JOIN = {"host": "a", "node_rank": None, "nproc": 1, "settings": {}}


@pytest.mark.parametrize(
    ("kind", "values", "wrong"),
    [
        *(("Welcome", WELCOME, {name: value}) for name, value in [
            ("node_rank", -1), ("node_rank", 2), ("hosts", []), ("hosts", ["node0"]),
            ("roles", ["a"]), ("store_port", 0),
            ("nodes_per_domain", [1]), ("nodes_per_domain", [2, 0]),
            ("nproc_per_node", [1, -1]), ("nproc_per_node", [10**12, 1]),
            ("nproc_per_node", [10**7, 10**7]), ("store_port", 70_000), ("causes", [{}]),
            ("causes", [{**CAUSE, "at_ns": None}]),
            ("causes", [{**CAUSE, "resize": {"left": []}}]), ("previous", {"mesh": "dp=2"}),
            ("previous", {"nnodes": 10**9, "nproc_per_node": 1, "mesh": None}),
        ]),
        ("Join", JOIN, {"nproc": -1}),
        ("Join", JOIN, {"node_rank": -1}),
        ("NextBegins", BEGIN, {"cause": {}}),
        ("NextBegins", BEGIN, {"cause": {**CAUSE, "raised": {"rank": 1}}}),
        ("NextBegins", BEGIN, {"cause": {**CAUSE, "at_ns": 10**30}}),
        ("NextBegins", BEGIN, {"generation": -1}),
        ("Cleared", {"generation": 0, "outcome": {}}, {"outcome": {"ranks": {"x": {}}}}),
        ("Cleared", {"generation": 0, "outcome": {}}, {"outcome": {"ranks": {"-1": {}}}}),
        ("Cleared", {"generation": 0, "outcome": {}}, {"outcome": {"trouble": {}}}),
        ("Failed", {"generation": 0, "outcome": {}},
         {"outcome": {"ranks": {"1": {"exited": {**EXITED, "wait_status": 0x137F}}}}}),
        ("Failed", {"generation": 0, "outcome": {}},
         {"outcome": {"ranks": {"1": {"exited": {**EXITED, "wait_status": 2**40}}}}}),
        ("LaunchOver", OVER, {"exit_code": 256}),
        ("LaunchOver", OVER, {"signum": 65}),
        ("LaunchOver", OVER, {"signum": -9}),
        ("Beat", {"at_ns": 1}, {"idle_s": float("nan")}),
        ("Beat", {"at_ns": 1}, {"idle_s": float("inf")}),
        ("Beat", {"at_ns": 1}, {"echo_ns": -(10**300)}),
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused(
    kind: str, values: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """A rank below 0, a port above 65535, the wait status of a process that has not ended."""
    decode(json.dumps([kind, values]).encode())
    with pytest.raises(MessageError):
        decode(json.dumps([kind, {**values, **wrong}]).encode())


def test_the_error_of_a_wrong_value_is_a_value_error() -> None:
    """That of msgspec is one only since 0.21, and older versions are supported too."""
    with pytest.raises(ValueError, match="Expected `int`, got `str`") as raised:
        convert(int, "1")
    assert type(raised.value) is ValueError


def test_text_of_other_launchers_moves_no_cursor() -> None:
    """Control characters are escaped, and long text is shortened in the middle."""
    said = encode(Waiting(text="a\x1b[2J\r\nmeshrun: all is well\u202e" + "x" * 5000 + "z"))
    told = decode(said)

    assert isinstance(told, Waiting)
    assert told.text.startswith(r"a\x1b[2J\r\nmeshrun: all is well\u202exx")
    assert told.text.endswith("xz")
    assert len(told.text) <= 1000
    raised = {"rank": 1, "at_ns": 1, "kind": "E\n", "message": "", "traceback": "a\n\tb\x07",
              "shown": False}  # fmt: skip
    text = json.dumps(["NextBegins", {**BEGIN, "cause": {**CAUSE, "raised": raised}}]).encode()
    begin = decode(text)
    assert isinstance(begin, NextBegins)
    assert begin.cause.raised is not None
    assert begin.cause.raised.kind == r"E\n"
    assert begin.cause.raised.traceback == "a\n\tb\\x07"


def changed(text: bytes, at: int, value: Any) -> bytes:
    """Return a message with one of its values replaced, at any depth."""
    message = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        pairs = inner.items() if isinstance(inner, dict) else enumerate(inner)
        for name, each in list(pairs):
            places.append((inner, name))
            if isinstance(each, dict | list):
                walk(each)

    walk(message[1])
    if places:
        inner, name = places[at % len(places)]
        inner[name] = value
    return json.dumps(message).encode()


@contextmanager
def connected(hub: Hub) -> Iterator[tuple[Connection, Connection]]:
    """Give both ends of a connection."""
    with closing(listen_on("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    connections = (
        Connection(near, ParticipantHandshake(b"s"), hub),
        Connection(far, CoordinatorHandshake(b"s"), hub),
    )
    yield connections
    for connection in connections:
        connection.close("the test is over")


def for_launch(hub: Hub) -> list[Event]:
    """Return the events that the state machine handles."""
    return [event for event in hub.events if isinstance(event, NodesEvent)]


@given(
    message=st.one_of([any_of(kind) for kind in KINDS]),
    at=st.integers(0, 99),
    value=JSON | st.sampled_from([-1, 2**31, 2**63, 10**400, 1e308, "\x1b[2J\n", [], {}]),
)
def test_nothing_that_a_peer_sends_breaks_a_launch(message: Message, at: int, value: Any) -> None:
    """Any message with any value changed is refused, or the launch runs to its end with it."""
    try:
        said = decode(changed(encode(message), at, value))
    except MessageError:
        return
    with Reactor() as reactor, connected(hub := Hub(reactor, note=str)) as (near, far):
        config = config_of(host="127.0.0.1", port=1)
        node = ThisNode(config=config, info=info("node1"), secret=b"s", hub=hub)
        participant = Participant(node, ("127.0.0.1",))
        participant._connection = near
        participant._receive(near, [said])
        as_participant, hub.events = for_launch(hub), deque()
        coordinator = RunningGeneration(0, {1: far}, world_size=4, hub=hub)
        coordinator.receive(1, far, said)
        coordinator.send(Cleared(generation=0, outcome=NodeOutcome()))
        as_coordinator = for_launch(hub)
    as_coordinator = [*COORDINATOR, *as_coordinator, *COORDINATOR_ENDED, ENDED]
    for events in ([READY, *as_participant], [*PARTICIPANT, *as_participant], as_coordinator):
        state, _ = play([*events, GONE], max_restarts=1)
        build_result(
            state, Layout.parse("dp=4", nnodes=2), hosts=["node0", "node1"],
            timings=Timings(began_ns=0),
        )  # fmt: skip


def test_a_message_names_its_kind() -> None:
    """So another version can report one that it does not know."""
    assert json.loads(encode(Waiting(text="w")))[0] == "Waiting"
    assert NextBegins in KINDS
    assert LaunchOver in KINDS


def test_what_is_sent_to_all_nodes_is_encoded_once() -> None:
    """And is small: each of 10,000 nodes receives the names of all."""
    names = [f"node{number}.cluster.example" for number in range(10_000)]
    welcome = Welcome(
        node_rank=0, hosts=tuple(names), nproc_per_node=(8,) * 10_000, roles=("default",) * 10_000,
        run_id="r", store_port=1,
    )  # fmt: skip
    text = SharedWelcome(welcome).encode(7, "10.0.0.8", 5)

    assert decode(text) == replace(welcome, node_rank=7, next_address="10.0.0.8", next_port=5)
    assert len(text) < 64 * 1024
    assert decode(encode(welcome)) == welcome


@pytest.mark.parametrize(
    "shared", ["", "x", base64.b64encode(zlib.compress(b"[" * (LONGEST + 1))).decode(), 7, None]
)
def test_a_welcome_that_cannot_be_unpacked_is_refused(shared: object) -> None:
    """Nor may it unpack to more than a frame holds."""
    values = {"shared": shared, "node_rank": 1, "next_address": "", "next_port": 0}
    with pytest.raises(MessageError):
        decode(json.dumps(["Welcome", values]).encode())
