"""Which of the joined nodes take part, and as which node rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import LayoutError, MeshrunError
from meshrun.layout import Layout
from meshrun.rendezvous.membership import Membership, describe_shapes
from meshrun.rendezvous.messages import Join


def node(host: str, workers: int = 1) -> Join:
    return Join(host=host, node_rank=None, nproc=workers, settings={})


def membership(
    count: int, *, mesh: str | None = "dp=1:8,tp=1", least: int = 1, most: int = 4, workers: int = 1
) -> Membership:
    """Return the membership of ``count`` nodes."""

    def fit(nodes: Sequence[Join]) -> Layout:
        return Layout.parse(mesh, nproc_per_node=[node.nproc for node in nodes])

    infos = {number: node(f"node{number}", workers) for number in range(count)}
    made = Membership(fit=fit, least=least, most=most, infos=infos)
    made.apply(made.choose())
    return made


def test_survivors_keep_their_order() -> None:
    """The nodes after a lost one move up."""
    nodes = membership(4)
    nodes.remove(1)

    assert nodes.choose().participants == (0, 2, 3)


def test_a_newcomer_takes_the_place_of_a_lost_node() -> None:
    """The others keep theirs; the next newcomer is last."""
    nodes = membership(3)
    nodes.remove(1)
    nodes.add(7, node("node7"))
    nodes.add(8, node("node8"))

    assert nodes.choose().participants == (0, 7, 2, 8)


def test_nodes_beyond_the_most_are_spares() -> None:
    """First come, first served."""
    nodes = membership(2, most=2)
    nodes.add(7, node("node7"))
    nodes.add(8, node("node8"))
    assert nodes.choose().spares == (7, 8)
    nodes.apply(nodes.choose())
    nodes.remove(1)

    assert nodes.choose().participants == (0, 7)
    assert nodes.choose().spares == (8,)


def test_nodes_that_the_mesh_cannot_use_are_spares() -> None:
    """dp=1:8,tp=2 on three nodes of one worker uses two of them."""
    nodes = membership(3, mesh="dp=1:8,tp=2")

    assert nodes.choose().participants == (0, 1)
    assert nodes.choose().spares == (2,)
    assert nodes.layout is not None
    assert nodes.layout.shape == {"dp": 1, "tp": 2}


def test_a_survivor_that_the_mesh_cannot_use_becomes_a_spare() -> None:
    """It is the first to take part again."""
    nodes = membership(4, mesh="dp=1:8,tp=2")
    nodes.remove(2)
    choice = nodes.choose()
    assert (choice.participants, choice.spares) == ((0, 1), (3,))
    nodes.apply(choice)
    nodes.add(7, node("node7"))

    assert nodes.choose().participants == (0, 1, 3, 7)


def test_an_error_names_the_nodes_when_too_few_joined() -> None:
    """It says how many are needed."""
    nodes = membership(2, least=2)
    nodes.remove(1)

    with pytest.raises(MeshrunError, match=r"^1 of at least 2 nodes joined \(node0\)$"):
        nodes.choose()


def test_a_mesh_that_fits_no_number_of_nodes_is_an_error_with_its_arithmetic() -> None:
    """For as many nodes as there are."""
    nodes = membership(2, mesh="dp=2,tp=1")
    nodes.remove(1)

    with pytest.raises(LayoutError, match=r"mesh `dp=2,tp=1` needs 2 workers"):
        nodes.choose()


@given(
    events=st.lists(st.integers(0, 9), max_size=30),
    tp=st.integers(1, 3),
    most=st.integers(1, 6),
)
def test_no_place_is_lost_or_taken_twice(events: list[int], tp: int, most: int) -> None:
    """However nodes join and leave, each has one place, and survivors keep their order."""
    nodes = membership(1, mesh=f"dp=1:8,tp={tp}", most=most, workers=tp)
    choice = nodes.choose()
    for number, event in enumerate(events, 1):
        others = [each for each in nodes.infos if each]
        if event < 5 or not others:
            nodes.add(number, node(f"node{number}", tp))
        else:
            nodes.remove(others[event % len(others)])
        before = [each for each in choice.participants if each in nodes.infos]
        choice = nodes.choose()

        assert sorted([*choice.participants, *choice.spares]) == sorted(nodes.infos)
        assert choice.participants[0] == 0
        assert len(choice.participants) == min(most, 8, len(nodes.infos))
        assert [each for each in choice.participants if each in before] == before[
            : len(choice.participants)
        ]
        nodes.apply(choice)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("dp=3,tp=2", "dp=4,tp=2", "dp 3 -> 4"),
        ("dp=2,tp=2", "dp=2,tp=2", "dp=2,tp=2 as before"),
        ("2x2", "4x2", "0 2 -> 4"),
        (None, "dp=2,tp=2", "dp=2,tp=2"),
    ],
)
def test_a_change_of_shapes_is_described_in_words(
    before: str | None, after: str, expected: str
) -> None:
    """They say which dims change, or that none does."""
    old = None if before is None else layout_of(before)

    assert describe_shapes(old, layout_of(after)) == expected


def test_ranks_without_a_mesh_are_counted() -> None:
    two, four = (Layout.parse(None, nproc_per_node=count) for count in (2, 4))

    assert describe_shapes(two, four) == "2 -> 4 ranks"
    assert describe_shapes(two, two) == "2 ranks as before"
    assert describe_shapes(two, Layout.parse(None, nproc_per_node=1)) == "2 -> 1 rank"


def layout_of(mesh: str) -> Layout:
    return Layout.parse(mesh)
