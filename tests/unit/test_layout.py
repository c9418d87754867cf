"""Ranks, coordinates, nodes and groups."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import LayoutError
from meshrun.layout import Layout, solve_layout
from meshrun.spec import MeshSpec, parse_mesh

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def layout_of(shape: tuple[int, ...], nodes: int = 1) -> Layout:
    return solve_layout(MeshSpec(sizes=shape), nnodes=nodes)


@given(shapes)
def test_rank_and_coordinate_are_inverses(shape: tuple[int, ...]) -> None:
    """Each rank has one coordinate, and each coordinate one rank."""
    layout = layout_of(shape)
    coordinates = [layout.coordinate(rank) for rank in range(layout.world_size)]

    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(math.prod(shape)))
    assert coordinates == sorted(set(coordinates))


@given(shapes)
def test_groups_of_a_dim_partition_the_ranks(shape: tuple[int, ...]) -> None:
    """Every rank is in one group of each dim, at the place its coordinate says."""
    layout = layout_of(shape)
    for dim, size in enumerate(shape):
        groups = list(layout.groups(dim))

        assert sorted(rank for group in groups for rank in group) == list(range(math.prod(shape)))
        for group in groups:
            assert len(group) == size
            assert [layout.coordinate(rank)[dim] for rank in group] == list(range(size))
            assert all(layout.group(dim, rank) == group for rank in group)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_nodes_hold_consecutive_ranks(counts: list[int]) -> None:
    """Node and local rank say the same as counting through the nodes, uneven ones too."""
    layout = Layout(mesh=None, nproc_per_node=tuple(counts))
    expected = [(node, local) for node, count in enumerate(counts) for local in range(count)]

    found = [(layout.node_rank(rank), layout.local_rank(rank)) for rank in range(sum(counts))]
    assert found == expected
    assert [list(layout.ranks_of_node(node)) for node in range(len(counts))] == [
        [rank for rank, (at, _) in enumerate(expected) if at == node] for node in range(len(counts))
    ]


def test_a_dim_crosses_nodes_when_its_group_does() -> None:
    """With four workers a node, tp of 4 stays inside and dp does not."""
    layout = solve_layout(parse_mesh("dp=2,tp=4"), nnodes=2)

    assert [layout.crosses_nodes(group) for group in layout.groups("tp")] == [False, False]
    assert all(layout.crosses_nodes(group) for group in layout.groups("dp"))


@pytest.mark.parametrize(
    ("mesh", "nnodes", "nproc", "sizes"),
    [
        ("dp=2,tp=4", None, None, (2, 4)),
        ("dp=-1,tp=4", None, 8, (2, 4)),
        ("dp=2,tp=-1", 2, 4, (2, 4)),
        ("-1", None, 3, (3,)),
        ("dp=1,tp=1", None, None, (1, 1)),
    ],
)
def test_open_numbers_are_worked_out(
    mesh: str, nnodes: int | None, nproc: int | None, sizes: tuple[int, ...]
) -> None:
    """A size of -1, the nodes and the workers follow from what is given."""
    layout = solve_layout(parse_mesh(mesh), nnodes=nnodes, nproc_per_node=nproc)

    assert layout.sizes == sizes
    assert layout.world_size == math.prod(sizes)


@given(shapes, st.integers(1, 6), st.integers(1, 24))
def test_any_mismatch_offers_a_mesh_that_fits(
    shape: tuple[int, ...], nodes: int, nproc: int
) -> None:
    """The first mesh in the hint fills exactly the workers there are."""
    try:
        solve_layout(MeshSpec(sizes=shape), nnodes=nodes, nproc_per_node=nproc)
    except LayoutError as error:
        assert math.prod(shape) != nodes * nproc
        assert error.hint is not None
        offered = error.hint.split("`")[1]
        fits = solve_layout(parse_mesh(offered), nnodes=nodes, nproc_per_node=nproc)
        assert fits.world_size == nodes * nproc
    else:
        assert math.prod(shape) == nodes * nproc


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    """There is no such rank to speak of."""
    layout = solve_layout(parse_mesh("dp=2,tp=4"))

    with pytest.raises(LayoutError, match=f"rank {rank} is outside a world of 8"):
        layout.coordinate(rank)


def test_a_dim_that_is_not_there_is_refused() -> None:
    """The message lists the dims there are."""
    layout = solve_layout(parse_mesh("dp=2,tp=4"))

    with pytest.raises(LayoutError, match="no dim `pp`") as caught:
        layout.group("pp", 0)
    assert caught.value.hint == "it has `dp`, `tp`"
