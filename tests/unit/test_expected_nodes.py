"""Which nodes have joined, how they are numbered, and which are missing."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.errors import UsageError
from meshrun.rendezvous.expected_nodes import (
    PROGRAM,
    PROGRAM_FILE,
    ExpectedNodes,
    TooManyNodesError,
    natural,
    note_different_arguments,
)
from meshrun.rendezvous.messages import Join
from tests.parties import info


def expected(nnodes: int, *infos: Join, hosts: tuple[str, ...] = ()) -> ExpectedNodes:
    """Return one with node 0 on ``node0``; these nodes have joined on connections 0, 1, ..."""
    gathered = ExpectedNodes(nnodes=nnodes, own=info("node0"), hosts=hosts)
    for number, each in enumerate(infos):
        gathered.join(number, each)
    return gathered


def order(gathered: ExpectedNodes) -> list[str]:
    return [gathered.joined[number].host for number in gathered.order()]


@given(st.permutations([f"node{number}" for number in range(1, 13)]))
def test_nodes_are_numbered_by_their_names(hosts: list[str]) -> None:
    """node2 before node10, whichever joined first."""
    gathered = expected(13, *map(info, hosts))

    assert order(gathered) == [f"node{number}" for number in range(1, 13)]


@given(st.data())
def test_given_ranks_hold_and_names_fill_the_gaps(data: st.DataObject) -> None:
    """Some nodes have --node-rank and some do not."""
    nnodes = data.draw(st.integers(2, 9))
    given_ranks = data.draw(st.sets(st.integers(1, nnodes - 1)))
    infos = [info(f"given{rank}", rank) for rank in given_ranks]
    infos += [info(f"free{number}") for number in range(nnodes - 1 - len(given_ranks))]
    found = order(expected(nnodes, *data.draw(st.permutations(infos))))

    assert all(found[rank - 1] == f"given{rank}" for rank in given_ranks)
    free = [host for host in found if host.startswith("free")]
    assert free == [f"free{number}" for number in range(len(free))]


def test_equal_names_are_numbered_as_they_joined() -> None:
    """Two launchers may be on one host."""
    gathered = expected(4, info("b"), info("a"), info("a"))

    assert gathered.order() == [1, 2, 0]


@given(st.lists(st.text(alphabet="ab0129-", max_size=6)))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    """Text and numbers are never compared; the order does not depend on the initial one."""
    mixed = list(names)
    random.Random(0).shuffle(mixed)

    assert sorted(names, key=natural) == sorted(mixed, key=natural)


def test_a_surplus_node_does_not_end_the_launch() -> None:
    """Its error names the nodes that joined first."""
    gathered = expected(3, info("node1"), info("node2"))

    assert gathered.is_complete
    with pytest.raises(
        TooManyNodesError, match="all 3 nodes have already joined: node0, node1, node2"
    ) as e:
        gathered.join(2, info("node3"))
    assert e.value.hint == "to add a node, use --nnodes 4 on every node"
    assert order(gathered) == ["node1", "node2"]


def test_a_node_that_left_may_join_again() -> None:
    """Its rank is free again."""
    gathered = expected(3, info("node1", 1))
    gathered.leave(0)
    gathered.leave(7)  # one that never joined
    gathered.join(1, info("node1", 1))

    assert list(gathered.joined) == [1]


@pytest.mark.parametrize(
    ("joining", "error"),
    [
        (info("c", 3), "c has --node-rank 3, but there are only 3 nodes"),
        (info("c", 0), "node0 and c both have --node-rank 0"),
        (info("c", 1), "b and c both have --node-rank 1"),
    ],
)
def test_an_impossible_rank_is_an_error(joining: Join, error: str) -> None:
    """The error names hosts and numbers."""
    with pytest.raises(UsageError, match=error):
        expected(3, info("b", 1), joining)


@pytest.mark.parametrize(
    ("own", "theirs", "error"),
    [
        ({"--mesh": "dp=2"}, {"--mesh": "dp=4"}, "--mesh is dp=4 on b, but dp=2 on a"),
        ({"--backend": "gloo"}, {}, "--backend is not set on b, but gloo on a"),
        ({}, {"--backend": "gloo"}, "--backend is gloo on b, but not set on a"),
        ({"--mesh": ""}, {"--mesh": "2"}, "--mesh is 2 on b, but not set on a"),
    ],
    ids=["another value", "only here", "only there", "nothing here"],
)
def test_a_difference_is_an_error(own: dict[str, str], theirs: dict[str, str], error: str) -> None:
    """It names option, values and hosts, whichever side has more options."""
    gathered = ExpectedNodes(nnodes=2, own=info("a", **own))

    with pytest.raises(UsageError, match=re.escape(f"{error} (node 0)")):
        gathered.join(0, info("b", **theirs))
    assert gathered.joined == {}


SCRIPT = {PROGRAM: ["a script", "the script x.py"]}
FILE = {PROGRAM_FILE: ["1", "a/x.py (sha256 1)"]}
ONE = {"argument 1": ["1", "`2`"]}


@pytest.mark.parametrize(
    ("own", "theirs", "error"),
    [
        (FILE, {PROGRAM_FILE: ["1", "b/x.py (sha256 1)"]}, None),
        (FILE, {PROGRAM_FILE: ["2", "b/x.py (sha256 2)"]},
         "the file of the program is b/x.py (sha256 2) on b, but a/x.py (sha256 1) on a"),
        (SCRIPT, {PROGRAM: ["-m x", "-m x"]}, "the program is -m x on b, but the script x.py on a"),
        ({**FILE, **ONE}, ONE, None),
        (FILE, {**FILE, **ONE}, None),
        (FILE, {}, None),
        ({}, FILE, None),
    ],
    ids=["another path", "content", "kind", "file not found", "arguments", "allowed there",
         "allowed here"],
)  # fmt: skip
def test_programs_are_compared(
    own: dict[str, list[str]], theirs: dict[str, list[str]], error: str | None
) -> None:
    """Each part has a value to compare and a text to show."""
    gathered = ExpectedNodes(nnodes=2, own=replace(info("a"), program=own))
    joining = replace(info("b"), program=theirs)

    if error is not None:
        with pytest.raises(UsageError, match=f"^{re.escape(error)} \\(node 0\\)"):
            gathered.join(0, joining)
        joining = replace(joining, role="another")  # which has its own program
    gathered.join(0, joining)


@pytest.mark.parametrize(
    ("own", "others", "note"),
    [
        (ONE, [ONE], ""),
        (ONE, [{}], ""),
        ({}, [ONE], ""),
        (FILE, [ONE], "argument 1 is `2` on b0, but not given on a (node 0)"),
        (ONE, [{**ONE, "argument 2": ["1", "`-v`"]}],
         "argument 2 is `-v` on b0, but not given on a (node 0)"),
        ({"argument 1": ["1", "`***`"]}, [{"argument 1": ["2", "`***`"]}],
         "argument 1 (`***`) differs between b0 and a (node 0)"),
        (ONE, [ONE, {"argument 1": ["3", "`3`"]}, FILE],
         "argument 1 is `3` on b1, but `2` on a (node 0; 2 nodes differ from it)"),
        (ONE, [FILE, FILE, FILE],
         "argument 1 is not given on b0, but `2` on a (node 0; 3 nodes differ from it)"),
    ],
    ids=["same", "allowed there", "allowed here", "more there", "second", "a secret", "one of them",
         "all"],
)  # fmt: skip
def test_different_arguments_are_noted(
    own: dict[str, list[str]], others: list[dict[str, list[str]]], note: str
) -> None:
    """For the first node that differs, and how many others do."""
    joined = [replace(info(f"b{number}"), program=each) for number, each in enumerate(others)]
    found = note_different_arguments(replace(info("a"), program=own), joined)

    assert found.partition("; if this is intended")[0] == note
    another_role = [replace(each, role="another") for each in joined]
    assert not note_different_arguments(replace(info("a"), program=own), another_role)


@pytest.mark.parametrize(
    ("nnodes", "joined", "hosts", "text"),
    [
        (2, [], (), "1 of 2 nodes joined; missing: node 1"),
        (4, [info("b", 2)], (), "2 of 4 nodes joined; missing: node 1, node 3"),
        (4, [info("b")], (), "2 of 4 nodes joined (node0, b); 2 missing"),
        (4, [info("n3.lan")], ("node0", "n2", "n3", "n10"),
         "2 of 4 nodes joined; missing: n2, n10"),
        (4, [info("N3.lan")], ("Node0", "n2", "n3", "n10"),
         "2 of 4 nodes joined; missing: n2, n10"),
        (4, [info("10.0.0.3")], ("node0", "10.0.0.2", "10.0.0.3", "10.0.0.4"),
         "2 of 4 nodes joined; missing: 10.0.0.2, 10.0.0.4"),
        (12, [], (), "1 of 12 nodes joined; missing: node 1, node 2, node 3, node 4, node 5,"
         " node 6, node 7, node 8 and 3 more"),
    ],
    ids=["none joined", "by rank", "no ranks", "by host, short or long", "in capitals",
         "by address", "many"],
)  # fmt: skip
def test_who_is_missing(nnodes: int, joined: list[Join], hosts: tuple[str, ...], text: str) -> None:
    """By the scheduler's names, or else by rank, or else only their number."""
    assert expected(nnodes, *joined, hosts=hosts).missing() == text


ADDRESSES = ("10.0.0.4", "10.0.0.5", "10.0.0.6")


@pytest.mark.parametrize(
    ("joined", "text"),
    [
        (info("ip-5", 1), "2 of 3 nodes joined; missing: 10.0.0.6"),
        (info("ip-5"), "2 of 3 nodes joined (node0, ip-5); 1 missing"),
    ],
    ids=["rank given", "no rank"],
)
def test_no_node_that_has_joined_is_named_as_missing(joined: Join, text: str) -> None:
    """Even if a scheduler's names for hosts are not their own."""
    assert expected(3, joined, hosts=ADDRESSES).missing() == text
