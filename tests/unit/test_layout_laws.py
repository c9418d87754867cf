"""Random layouts with all features combined; each answer is compared with counting by rank."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrun.errors import LayoutError
from meshrun.layout import Flatten, Layout, View
from meshrun.layout.spec import MeshSpec
from tests.layouts import divisors, node_counts

NAMES = ("dp", "_", "tp_1", "index", "self")
MOST_RANKS = 48


@st.composite
def factors(draw: st.DrawFn, number: int, most: int) -> tuple[int, ...]:
    """Sizes whose product is ``number``, which may include 1."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(0, most - 1))):
        sizes.append(draw(st.sampled_from(divisors(number // math.prod(sizes)))))
    return (*sizes, number // math.prod(sizes))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Meshes with and without names, flattened dims, and views of one or several dims."""
    world_size = draw(st.integers(1, MOST_RANKS))
    sizes = draw(factors(world_size, len(NAMES)))
    own_rank = draw(st.integers(0, world_size - 1))
    counts = draw(node_counts(world_size))
    named = draw(st.integers(0, 4)) > 0
    names = NAMES[: len(sizes)] if named else None
    flattens, views = [], []
    if names and len(sizes) > 1:
        for name in draw(st.sampled_from([(), ("x",), ("x", "y")])):
            joined = draw(st.sets(st.sampled_from(names), min_size=2))
            flattens.append(Flatten(name=name, dims=tuple(sorted(joined, key=names.index))))
    for view in draw(st.sampled_from([(), ("v",), ("v", "w")])):
        parts = draw(factors(world_size, 4))
        labels = tuple(f"{view}{place}" for place in range(len(parts)))
        views.append(View(name=view, mesh=MeshSpec(sizes=parts, mesh_dim_names=labels)))
    return Layout(
        mesh=MeshSpec(sizes=sizes, mesh_dim_names=names),
        nproc_per_node=counts,
        own_rank=own_rank,
        flattens=tuple(flattens),
        views=tuple(views),
    )


def places(layout: Layout) -> dict[str, list[int]]:
    """Return the index of every rank on every dim, counted through the meshes in order."""
    assert layout.mesh is not None
    found: dict[str, list[int]] = {}
    for names, sizes in [
        (layout.shape, layout.sizes),
        *((view.mesh.mesh_dim_names or (), view.mesh.sizes) for view in layout.views),
    ]:
        coordinates = list(itertools.product(*map(range, sizes)))
        for dim, name in enumerate(names):
            found[name] = [coordinate[dim] for coordinate in coordinates]
    for flatten in layout.flattens:
        joined = list(zip(*(found[dim] for dim in flatten.dims), strict=True))
        order = sorted(set(joined))
        found[flatten.name] = [order.index(place) for place in joined]
    return found


def groups_of(layout: Layout, dim: str) -> list[list[int]]:
    """Return groups of ranks that differ only on this dim, sorted by their first rank."""
    of_view = [view.mesh.mesh_dim_names or () for view in layout.views]
    flattened = {flatten.name: flatten.dims for flatten in layout.flattens}
    own = flattened.get(dim, (dim,))
    whole = next((names for names in of_view if dim in names), tuple(layout.shape))
    rest = [name for name in whole if name not in own]
    table = places(layout)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        found.setdefault(tuple(table[name][rank] for name in rest), []).append(rank)
    return sorted(found.values())


@given(layouts())
def test_every_dim_agrees_with_counting(layout: Layout) -> None:
    """Groups, indices, neighbors, crossings and rails, on nodes of any sizes."""
    node_of = [node for node, count in enumerate(layout.nproc_per_node) for _ in range(count)]
    local_of = [local for count in layout.nproc_per_node for local in range(count)]
    for dim, on_dim in places(layout).items():
        groups = groups_of(layout, dim)
        assert [list(group) for group in layout.groups(dim)] == groups
        assert layout.size(dim) == len(groups[0])
        for group in groups:
            for place, rank in enumerate(group):
                assert layout.dim_rank(dim, rank) == on_dim[rank] == place
                assert list(layout.group(dim, rank)) == group
                assert layout.source(dim, rank) == group[0]
                for step in (-1, 1, len(group), 2 * len(group) + 1):
                    around = group[(place + step) % len(group)]
                    inside = 0 <= place + step < len(group)
                    assert layout.neighbor(dim, step, rank) == (around if inside else None)
                    assert layout.neighbor(dim, step, rank, wrap=True) == around
        crossing = [len({node_of[rank] for rank in group}) > 1 for group in groups]
        aligned = [len({local_of[rank] for rank in group}) == 1 for group in groups]
        assert layout.count_crossing(dim) == sum(crossing)
        assert layout.crosses_nodes(dim) == any(crossing)
        assert layout.rail_aligned(dim) == all(aligned)


@settings(max_examples=300)
@given(layouts(), st.data())
def test_ranks_are_filtered_by_any_dims_at_once(layout: Layout, data: st.DataObject) -> None:
    """Dims of the mesh, of views and flattened ones, overlapping or not."""
    table = places(layout)
    chosen = data.draw(st.lists(st.sampled_from(sorted(table)), unique=True, max_size=3))
    wanted: dict[str, Any] = {
        dim: data.draw(
            st.integers(0, layout.size(dim) - 1)
            | st.lists(st.integers(0, layout.size(dim) - 1), max_size=4)
        )
        for dim in chosen
    }
    expected = [
        rank
        for rank in range(layout.world_size)
        if all(
            table[dim][rank] in (given if isinstance(given, Iterable) else [given])
            for dim, given in wanted.items()
        )
    ]
    assert list(layout.ranks(**wanted)) == expected


@settings(max_examples=300)
@given(layouts(), st.data())
def test_dims_that_do_not_overlap_identify_a_rank(layout: Layout, data: st.DataObject) -> None:
    """Others are an error; omitted dims have the own rank's index."""
    table = places(layout)
    own = layout.own_rank
    assert own is not None
    chosen = data.draw(st.lists(st.sampled_from(sorted(table)), unique=True, max_size=3))
    wanted = {dim: data.draw(st.integers(0, layout.size(dim) - 1)) for dim in chosen}
    meshes = [{*layout.shape}, *({*(view.mesh.mesh_dim_names or ())} for view in layout.views)]
    try:
        rank = layout.rank(**wanted)
    except LayoutError as error:
        assert "overlap" in error.message
        assert not any({*chosen} <= dims for dims in meshes)
    else:
        combinations = {tuple(table[dim][at] for dim in chosen) for at in range(layout.world_size)}
        assert len(combinations) == math.prod(layout.size(dim) for dim in chosen)
        assert all(table[dim][rank] == index for dim, index in wanted.items())
        assert layout.rank(**{dim: table[dim][own] for dim in chosen}) == own
        if set(chosen) <= set(layout.shape):
            left = [dim for dim in layout.shape if dim not in chosen]
            assert all(table[dim][rank] == table[dim][own] for dim in left)


@given(layouts())
def test_labels_are_unique_and_sort_as_ranks_do(layout: Layout) -> None:
    """They have one width, so that a folder's listing is in the order of ranks."""
    labels = [layout.label(rank) for rank in range(layout.world_size)]

    assert labels == sorted(set(labels))
    assert len({len(label) for label in labels}) == 1
    assert not any(set(label) & set("/\\ .=,") for label in labels)


@given(layouts(), layouts())
def test_equal_layouts_answer_alike(one: Layout, other: Layout) -> None:
    """Mesh, nodes and derived dims decide; copies of every kind are equal."""
    copies = [
        Layout.from_dict(json.loads(json.dumps(one.to_dict()))),
        pickle.loads(pickle.dumps(one)),
        copy.copy(one),
        copy.deepcopy(one),
        dataclasses.replace(one, own_rank=None, generation=3),
    ]
    for again in copies:
        assert again == one
        assert hash(again) == hash(one)
        assert [again.label(rank) for rank in range(again.world_size)] == [
            one.label(rank) for rank in range(one.world_size)
        ]
        for dim in places(one):
            assert list(map(list, again.groups(dim))) == list(map(list, one.groups(dim)))
    assert copies[1].own_rank == one.own_rank
    values = [{**layout.to_dict(), "generation": 0} for layout in (one, other)]
    assert (one == other) == (values[0] == values[1])


@given(layouts(), st.data())
def test_ranks_cross_nodes_when_two_of_them_do(layout: Layout, data: st.DataObject) -> None:
    """For any ranks in any order, not only for groups."""
    some = data.draw(st.lists(st.integers(0, layout.world_size - 1), max_size=5))

    assert layout.crosses_nodes(some) == (len({layout.node_rank(rank) for rank in some}) > 1)


@given(layouts(), layouts(), st.data())
def test_stages_are_matched_both_ways(one: Layout, other: Layout, data: st.DataObject) -> None:
    """Ranks of any two groups name each other, or the groups cannot be matched."""
    mine, theirs = (
        data.draw(st.sampled_from(list(layout.groups(data.draw(st.sampled_from(sorted(dims)))))))
        for layout, dims in ((one, places(one)), (other, places(other)))
    )
    if len(mine) % len(theirs) and len(theirs) % len(mine):
        with pytest.raises(LayoutError, match=f"match {len(mine)} ranks with {len(theirs)}\n"):
            one.map_to(theirs, mine[0], among=mine)
        return
    there = {(rank, peer) for rank in mine for peer in one.map_to(theirs, rank, among=mine)}
    back = {(peer, rank) for rank in theirs for peer in other.map_to(mine, rank, among=theirs)}
    assert there == back
    assert len(there) == max(len(mine), len(theirs))
