"""Ranks, coordinates, nodes and groups."""

import copy
import dataclasses
import json
import math
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import LayoutError
from meshrun.layout import Layout, solve_layout
from meshrun.layout.spec import MeshSpec, parse_mesh
from tests.layouts import layouts, shapes


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
    """Every rank is in one group of each dim, at the index in its coordinate."""
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
    """Node and local rank agree with counting through the nodes, also if they are uneven."""
    layout = Layout(mesh=None, nproc_per_node=tuple(counts))
    expected = [(node, local) for node, count in enumerate(counts) for local in range(count)]

    found = [(layout.node_rank(rank), layout.local_rank(rank)) for rank in range(sum(counts))]
    assert found == expected
    assert [list(layout.ranks_of_node(node)) for node in range(len(counts))] == [
        [rank for rank, (at, _) in enumerate(expected) if at == node] for node in range(len(counts))
    ]


def test_a_dim_crosses_nodes_when_its_group_does() -> None:
    """With four workers per node, tp=4 stays within a node, and dp does not."""
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
def test_open_numbers_are_inferred(
    mesh: str, nnodes: int | None, nproc: int | None, sizes: tuple[int, ...]
) -> None:
    """A size of -1, the number of nodes and that of workers follow from the others."""
    layout = solve_layout(parse_mesh(mesh), nnodes=nnodes, nproc_per_node=nproc)

    assert layout.sizes == sizes
    assert layout.world_size == math.prod(sizes)


@given(shapes, st.integers(1, 6), st.integers(1, 24))
def test_any_mismatch_offers_a_mesh_that_fits(
    shape: tuple[int, ...], nodes: int, nproc: int
) -> None:
    """The first mesh in the hint, and its numbers of workers, fit exactly."""
    try:
        solve_layout(MeshSpec(sizes=shape), nnodes=nodes, nproc_per_node=nproc)
    except LayoutError as error:
        assert math.prod(shape) != nodes * nproc
        assert error.hint is not None
        offered = error.hint.split("`")[1]
        fits = solve_layout(parse_mesh(offered), nnodes=nodes, nproc_per_node=nproc)
        assert fits.world_size == nodes * nproc
        for numbers in re.findall(r"--nproc-per-node ([\d,]+) for", error.hint):
            each = [int(number) for number in numbers.split(",")]
            solve_layout(MeshSpec(sizes=shape), nnodes=nodes, nproc_per_node=each)
    else:
        assert math.prod(shape) == nodes * nproc


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_an_error(rank: int) -> None:
    layout = solve_layout(parse_mesh("dp=2,tp=4"))

    with pytest.raises(LayoutError, match=f"rank {rank} is outside a world of 8"):
        layout.coordinate(rank)


def test_an_unknown_dim_is_an_error() -> None:
    """The hint lists the dims of the mesh."""
    layout = solve_layout(parse_mesh("dp=2,tp=4"))

    with pytest.raises(LayoutError, match="no dim `pp`") as caught:
        layout.group("pp", 0)
    assert caught.value.hint == "use `dp`, `tp`"


# ---- compared with counting ----------------------------------------------------------------


@given(layouts(are_named=True))
def test_answers_about_a_dim_agree_with_its_groups(layout: Layout) -> None:
    """Indices, neighbors, ends and sources follow from the groups."""
    for dim, size in layout.shape.items():
        assert layout.size(dim) == size
        for group in layout.groups(dim):
            assert layout.source(dim, group[0]) == group[0]
            for place, rank in enumerate(group):
                assert layout.dim_rank(dim, rank) == place
                assert layout.source(dim, rank) == group[0]
                assert layout.is_first(dim, rank) == (place == 0)
                assert layout.is_last(dim, rank) == (place == size - 1)
                for offset in range(-size - 1, size + 2):
                    inside = 0 <= place + offset < size
                    found = layout.neighbor(dim, offset, rank)
                    assert found == (group[place + offset] if inside else None)
                    around = layout.neighbor(dim, offset, rank, wrap=True)
                    assert around == group[(place + offset) % size]


@given(layouts(are_named=True))
def test_crossings_are_counted_without_listing(layout: Layout) -> None:
    """The arithmetic agrees with a look at every group, on even and uneven nodes."""
    for dim in layout.shape:
        groups = list(layout.groups(dim))
        crossing = [len({layout.node_rank(rank) for rank in group}) > 1 for group in groups]
        aligned = [len({layout.local_rank(rank) for rank in group}) == 1 for group in groups]

        assert [layout.crosses_nodes(group) for group in groups] == crossing
        assert layout.count_crossing(dim) == sum(crossing)
        assert layout.crosses_nodes(dim) == any(crossing)
        assert layout.rail_aligned(dim) == all(aligned)


@given(layouts(are_named=True))
def test_slots_are_ranks(layout: Layout) -> None:
    """Each rank has one slot, and each slot one rank."""
    for rank in range(layout.world_size):
        assert layout.slot(rank) == (layout.node_rank(rank), layout.local_rank(rank))
        assert layout.rank_at(*layout.slot(rank)) == rank


@given(layouts(are_named=True), st.data())
def test_ranks_are_found_by_their_indices(layout: Layout, data: st.DataObject) -> None:
    """A filter returns the ranks whose coordinates match, in order."""
    some = data.draw(st.sets(st.sampled_from(list(layout.shape))))
    wanted = {
        dim: data.draw(st.lists(st.integers(0, layout.size(dim) - 1), max_size=3)) for dim in some
    }
    expected = [
        rank
        for rank in range(layout.world_size)
        if all(getattr(layout.coordinate(rank), dim) in wanted[dim] for dim in wanted)
    ]
    assert list(layout.ranks(**wanted)) == expected
    ones = {dim: indices[0] for dim, indices in wanted.items() if indices}
    assert layout.ranks(**ones) == layout.ranks(**{dim: [at] for dim, at in ones.items()})


@given(layouts(are_named=True), st.data())
def test_omitted_dims_are_those_of_the_own_rank(layout: Layout, data: st.DataObject) -> None:
    """rank(dp=1) has the own rank's coordinate, except for dp."""
    some = data.draw(st.sets(st.sampled_from(list(layout.shape))))
    wanted = {dim: data.draw(st.integers(0, layout.size(dim) - 1)) for dim in some}
    own = dict(zip(layout.shape, layout.coordinate(), strict=True))
    expected = tuple({**own, **wanted}.values())

    assert layout.rank(**wanted) == layout.rank(expected)
    assert layout.rank() == layout.own_rank


@given(layouts(are_named=True))
def test_a_layout_survives_json_and_pickle(layout: Layout) -> None:
    """The copy is equal and gives the same answers; only JSON loses the own rank.

    ``dataclasses.asdict()`` gives plain values, too.
    """
    assert json.dumps(dataclasses.asdict(layout))
    from_json = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    for again in (from_json, pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert again == layout
        assert hash(again) == hash(layout)
        assert [list(again.groups(dim)) for dim in again.shape] == [
            list(layout.groups(dim)) for dim in layout.shape
        ]
        assert [again.slot(rank) for rank in range(again.world_size)] == [
            layout.slot(rank) for rank in range(layout.world_size)
        ]
    assert from_json.own_rank is None


@given(st.integers(1, 24), st.integers(1, 24))
def test_matched_ranks_are_whole_blocks(mine: int, theirs: int) -> None:
    """Partners name each other, and every rank has one."""
    one, other = Layout.parse(str(mine)), Layout.parse(str(theirs))
    if mine % theirs and theirs % mine:
        with pytest.raises(LayoutError, match=f"cannot match {mine} ranks with {theirs}"):
            one.map_to(other, 0)
        return
    there = {(rank, peer) for rank in range(mine) for peer in one.map_to(other, rank)}
    back = {(peer, rank) for rank in range(theirs) for peer in other.map_to(one, rank)}

    assert there == back
    assert len(there) == max(mine, theirs)
    assert {peer for _, peer in there} == set(range(theirs))
    assert all(one.map_to(other, rank) == sorted(one.map_to(other, rank)) for rank in range(mine))


def test_stages_of_one_mesh_are_matched() -> None:
    """The ranks of a stage have partners in the next stage."""
    layout = Layout.parse("pp=2,dp=2,tp=2")
    first, last = layout.ranks(pp=0), layout.ranks(pp=1)

    assert [layout.map_to(last, rank, among=first) for rank in first] == [[4], [5], [6], [7]]
    assert layout.map_to([6, 7], 3, among=first) == [7]
    with pytest.raises(LayoutError, match="rank 5 is not in `among`, which has 4 ranks"):
        layout.map_to(last, 5, among=first)


# ---- size ----------------------------------------------------------------------------------


def test_a_large_layout_answers_for_every_rank() -> None:
    """16,384 ranks, without listing all of them for an answer; a benchmark measures the speed."""
    layout = Layout.parse("dp=256,pp=8,tp=8", nnodes=2048)
    other = Layout.parse("dp=128,tp=64")
    for rank in range(layout.world_size):
        dp, pp, tp = layout.coordinate(rank)
        assert layout.rank((dp, pp, tp)) == layout.rank(dp=dp, pp=pp, tp=tp) == rank
        assert layout.ranks(dp=dp, pp=pp) == layout.group("tp", rank)
        assert layout.rank_at(*layout.slot(rank)) == rank
        assert layout.group("pp", rank)[layout.dim_rank("pp", rank)] == rank
        assert layout.neighbor("pp", -pp, rank) == layout.source("pp", rank)
        assert layout.label(rank) == f"dp{dp:03}_pp{pp}_tp{tp}"
        assert layout.map_to(other, rank) == [rank // 2]


@pytest.mark.parametrize("nodes", [(8,) * 125_000, (1,) * 1_000_000, (8, 4, 4) * 62_500])
def test_crossings_of_a_million_ranks(nodes: tuple[int, ...]) -> None:
    """They are not counted rank by rank, even on uneven nodes."""
    layout = Layout(mesh=parse_mesh("dp=1000,pp=10,tp=100"), nproc_per_node=nodes)
    crossing = {dim: layout.count_crossing(dim) for dim in layout.shape}

    assert crossing == {"dp": 1000, "pp": 100_000, "tp": 10_000}


def test_no_torch_is_needed() -> None:
    """The layout layer works without importing it."""
    code = (
        "import sys, meshrun; meshrun.Layout.parse('dp=2').groups('dp'); meshrun.data_shard();"
        "meshrun.current_layout(); assert not {'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dims_within_a_node_in_one_text() -> None:
    """As on the command line. ``place`` must be one of two words."""
    sizes = {"nnodes": 2, "nproc_per_node": 4}
    asked: dict[str, Any] = {**sizes, "place": "auto"}
    listed = Layout.parse("dp=2,cp=2,tp=2", intra_node=["dp", "cp"], **asked)

    assert Layout.parse("dp=2,cp=2,tp=2", intra_node="dp,cp", **asked) == listed
    assert Layout.parse("dp=2,cp=2,tp=2", intra_node="", **sizes).slot_order is None
    with pytest.raises(LayoutError, match="found `near`"):
        Layout.parse("dp=8", **sizes, place="near")
