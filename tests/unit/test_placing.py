"""Which ranks are on which node: open sizes, uneven nodes, groups within a node."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshrun.errors import LayoutError
from meshrun.layout import Layout
from meshrun.layout.axes import SlotMap, axes_of

NAMES = "abcd"


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, list[int], list[str]]:
    """Return a mesh, perhaps with an open size, each node's slots, and dims to keep in a node."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    texts = [f"{name}={size}" for name, size in zip(NAMES, sizes, strict=False)]
    is_open = draw(st.booleans())
    if is_open:
        dim = draw(st.integers(0, len(sizes) - 1))
        texts[dim] = f"{NAMES[dim]}={draw(st.sampled_from(['-1', '1:3', '2:', '2:5']))}"
        slots = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    else:
        slots, left = [], math.prod(sizes)
        while left:
            slots.append(draw(st.integers(1, left)))
            left -= slots[-1]
    together = draw(st.sets(st.sampled_from(NAMES[: len(sizes)])))
    return ",".join(texts), slots, sorted(together)


@given(asked(), st.sampled_from(["contiguous", "auto"]))
def test_ranks_are_placed_as_requested(case: tuple[str, list[int], list[str]], place: str) -> None:
    """Each rank has its own slot, no node has too many, and no group of these dims crosses."""
    text, slots, together = case
    try:
        layout = Layout.parse(text, nproc_per_node=slots, intra_node=together, place=place)
    except LayoutError as error:
        assert error.hint
        return
    seats = [layout.slot(rank) for rank in range(layout.world_size)]
    assert len(set(seats)) == layout.world_size == math.prod(layout.sizes)
    assert all(used <= slot for used, slot in zip(layout.nproc_per_node, slots, strict=True))
    assert [layout.rank_at(*seat) for seat in seats] == list(range(layout.world_size))
    for node, count in enumerate(layout.nproc_per_node):
        ranks = list(layout.ranks_of_node(node))
        assert [layout.slot(rank) for rank in ranks] == [(node, at) for at in range(count)]
    for dim in together:
        assert not layout.crosses_nodes(dim)
    for dim in layout.shape:
        groups = [list(group) for group in layout.groups(dim)]
        nodes = [{layout.node_rank(rank) for rank in group} for group in groups]
        rails = [{layout.local_rank(rank) for rank in group} for group in groups]
        assert layout.count_crossing(dim) == sum(len(found) > 1 for found in nodes)
        assert [layout.crosses_nodes(group) for group in groups] == [len(n) > 1 for n in nodes]
        assert layout.rail_aligned(dim) == all(len(found) == 1 for found in rails)
    assert Layout.from_dict(layout.to_dict()) == layout == pickle.loads(pickle.dumps(layout))


@given(asked())
def test_the_largest_mesh_that_fits_is_found(case: tuple[str, list[int], list[str]]) -> None:
    """None larger fits in any order of ranks, and a mesh that fits is not refused."""
    text, slots, together = case
    assume("-1" in text or ":" in text)
    fits = []
    for size in range(1, 49):
        fixed = text
        for form in ("=-1", "=1:3", "=2:5", "=2:"):
            fixed = fixed.replace(form, f"={size}")
        sizes = [int(part.partition("=")[2]) for part in fixed.split(",")]
        kept = math.prod(each for name, each in zip(NAMES, sizes, strict=False) if name in together)
        room = sum(slot // kept for slot in slots) * kept
        in_range = not ("=1:3" in text and size > 3) and not (
            ("=2:5" in text and not 2 <= size <= 5) or ("=2:" in text and size < 2)
        )
        if in_range and math.prod(sizes) <= room:
            fits.append(math.prod(sizes))
    try:
        found = Layout.parse(
            text, nproc_per_node=slots, intra_node=together, place="auto"
        ).world_size
    except LayoutError:
        found = 0
    if found:
        # Ranks that are merely contiguous may fit where whole blocks do not.
        assert found >= max(fits, default=0)
    else:
        assert fits == []


def test_renumbered_ranks_keep_the_mesh() -> None:
    """Groups and coordinates are torch's; only nodes and local ranks change."""
    plain = Layout.parse("tp=4,dp=2", nnodes=2)
    placed = Layout.parse("tp=4,dp=2", nnodes=2, intra_node=["tp"], place="auto")

    assert placed.slot_order == ("dp", "tp")
    assert [placed.coordinate(rank) for rank in range(8)] == [
        plain.coordinate(rank) for rank in range(8)
    ]
    assert [placed.slot(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert placed.ranks_of_node(1) == [1, 3, 5, 7]
    assert (placed.count_crossing("tp"), placed.count_crossing("dp")) == (0, 4)
    assert placed.rail_aligned("dp")


def test_ranks_that_need_no_renumbering_keep_their_order() -> None:
    """They are numbered node by node where that satisfies the request."""
    placed = Layout.parse("dp=2,tp=4", nnodes=2, intra_node=["tp"], place="auto")

    assert placed.slot_order is None
    assert placed == Layout.parse("dp=2,tp=4", nnodes=2)


def test_slots_with_no_room_for_a_whole_group_are_spare() -> None:
    """A node of eight holds two groups of three."""
    layout = Layout.parse("dp=-1,tp=3", nnodes=2, nproc_per_node=8, intra_node=["tp"])

    assert layout.shape == {"dp": 4, "tp": 3}
    assert layout.nproc_per_node == (6, 6)
    assert Layout.parse("dp=-1,tp=3", nnodes=2, nproc_per_node=8).nproc_per_node == (8, 7)


def test_a_node_too_small_for_a_group_has_no_ranks() -> None:
    """It still counts as a node, so node ranks stay those of the machines."""
    layout = Layout.parse("dp=-1,tp=4", nproc_per_node=[8, 2, 8], intra_node=["tp"])

    assert layout.nproc_per_node == (8, 0, 8)
    assert list(layout.ranks_of_node(1)) == []
    assert layout.slot(8) == (2, 0)


def test_dims_without_names_are_given_by_index() -> None:
    layout = Layout.parse("4x2", nnodes=2, intra_node=["0"], place="auto")

    assert layout.slot_order == ("1", "0")
    assert not layout.crosses_nodes(0)
    with pytest.raises(LayoutError, match="has no dim `tp`"):
        Layout.parse("4x2", nnodes=2, intra_node=["tp"])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))))
))  # fmt: skip
def test_moved_groups_have_the_slots_of_their_ranks(case: tuple[list[int], list[int]]) -> None:
    """The arithmetic over slots agrees with a mapping rank by rank."""
    sizes, order = case
    slot_map, world = SlotMap.of(sizes, order), math.prod(sizes)
    assert [slot_map.rank(slot_map.slot(rank)) for rank in range(world)] == list(range(world))
    for axis in axes_of(sizes):
        over_slots = slot_map.axis(axis)
        assert over_slots is not None
        found = {frozenset(group) for group in over_slots.groups(world)}
        assert found == {
            frozenset(slot_map.slot(rank) for rank in group) for group in axis.groups(world)
        }


def test_crossing_groups_of_views_that_split_dims_are_counted() -> None:
    """Without arithmetic over slots, ranks are compared one by one."""
    layout = Layout.parse("a=2,b=6", nnodes=3, intra_node=["a"], place="auto", views=["v:x=3,y=4"])

    for dim in ("x", "y"):
        groups = [list(group) for group in layout.groups(dim)]
        crossing = [len({layout.node_rank(rank) for rank in group}) > 1 for group in groups]
        assert layout.count_crossing(dim) == sum(crossing)
    assert any(layout.crosses_nodes(dim) for dim in ("x", "y"))


def test_a_slot_order_names_each_dim_once() -> None:
    """Any other comes from a broken environment."""
    mesh = Layout.parse("dp=2,tp=4").mesh
    with pytest.raises(LayoutError, match="must contain each dim once"):
        Layout(mesh=mesh, nproc_per_node=(8,), slot_order=("dp", "dp"))
