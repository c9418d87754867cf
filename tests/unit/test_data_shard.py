"""Which part of the data a rank reads, from its environment alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun import Layout, MeshError, current_layout, data_shard
from meshrun.errors import LayoutError

DATA = ("dp", "dp_replicate", "data", "batch", "fsdp", "replicate", "shard", "ddp", "hsdp")
OTHER = ("tp", "cp", "pp", "ep", "dpx", "mdp", "sharded", "DP")


@contextmanager
def be(layout: Layout, rank: int, **variables: str) -> Iterator[None]:
    """Give this process only the variables of one rank, for the duration of the context."""
    values = layout.to_dict()
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.world_size),
        "MESHRUN_MESH": values["mesh"],
        "MESHRUN_FLATTEN": ";".join(values["flatten"]),
        "MESHRUN_VIEW": ";".join(values["views"]),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {**environment, **variables})
        yield


def shards(layout: Layout, *dims: str | int, **variables: str) -> list[tuple[int, int]]:
    """Return the shard of every rank of a layout, in order."""
    found = []
    for rank in range(layout.world_size):
        with be(layout, rank, **variables):
            found.append(data_shard(*dims))
    return found


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("dp=2,tp=2", [0, 0, 1, 1]),
        ("tp=2,dp=2", [0, 1, 0, 1]),
        ("dp=2,cp=2,tp=2", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("pp=2,dp=2,tp=2", [0, 0, 1, 1, 0, 0, 1, 1]),
        ("replicate=2,shard=2", [0, 1, 2, 3]),
        ("dp_replicate=2,dp_shard=2,tp=2", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("dp_replicate=2,tp=2,dp_shard=2", [0, 1, 0, 1, 2, 3, 2, 3]),
        ("dp=1,tp=4", [0, 0, 0, 0]),
        ("pp=2,tp=2", [0, 0, 0, 0]),
    ],
)
def test_the_dims_of_the_data_split_it(spec: str, parts: list[int]) -> None:
    """Ranks of one tp, cp or pp group read the same part, whatever the order of dims."""
    assert shards(Layout.parse(spec)) == [(part, max(parts) + 1) for part in parts]


@given(st.lists(st.tuples(st.sampled_from(DATA + OTHER), st.integers(1, 4)), min_size=1,
                max_size=4, unique_by=lambda dim: dim[0]))  # fmt: skip
def test_all_parts_are_read_equally_often(dims: list[tuple[str, int]]) -> None:
    """In every mesh, two ranks read different parts if they differ on a data dim, and only then."""
    layout = Layout.parse(",".join(f"{name}={size}" for name, size in dims))
    found = shards(layout)
    places = [
        tuple(getattr(layout.coordinate(rank), name) for name, _ in dims if name in DATA)
        for rank in range(layout.world_size)
    ]

    parts = found[0][1]
    assert {part for part, _ in found} == set(range(parts)) == set(range(len(set(places))))
    assert len(set(Counter(found).values())) == 1
    assert len(set(zip(found, places, strict=True))) == parts
    assert [part for part, _ in found] == [sorted(set(places)).index(place) for place in places]


def test_other_dims_are_named() -> None:
    """By the call, by index or by the variable; also flattened dims and those of views."""
    layout = Layout.parse("pp=2,dp=2,cp=2", flatten=["dp+cp"], views=["moe:a=4,ep=2"])

    assert shards(layout, "cp") == [(rank % 2, 2) for rank in range(8)]
    assert shards(layout, 2) == shards(layout, "ep") == shards(layout, "cp")
    assert shards(layout, "dp_cp") == [(rank % 4, 4) for rank in range(8)]
    assert shards(layout, "dp", "cp") == shards(layout, "dp_cp")
    assert shards(layout, "pp", "ep") == shards(layout, "pp", "cp")
    assert shards(layout, "cp", "pp")[1] == (2, 4)
    for variable in (" dp_cp ", "dp, ep", "dp,cp,"):
        assert shards(layout, MESHRUN_DATA_DIMS=variable) == shards(layout, "dp_cp")
        assert shards(layout, "pp", MESHRUN_DATA_DIMS=variable) == shards(layout, "pp")
    unnamed = Layout.parse("2x2")
    assert shards(unnamed, MESHRUN_DATA_DIMS="1") == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (("dp", "dp_cp"), "data dims `dp`, `dp_cp` overlap"),
        (("dp", "dp"), "data dims `dp`, `dp` overlap"),
        ((1, "dp"), "data dims `1`, `dp` overlap"),
        (("cp", "ep"), "data dims `cp`, `ep` overlap"),
        (("xx",), "has no dim `xx`"),
        ((3,), "has no dim `3`"),
    ],
)
def test_dims_that_do_not_split_cleanly_are_rejected(
    dims: tuple[str | int, ...], message: str
) -> None:
    """With overlapping dims, some samples would be read twice."""
    layout = Layout.parse("pp=2,dp=2,cp=2", flatten=["dp+cp"], views=["moe:a=4,ep=2"])

    with be(layout, 3), pytest.raises(LayoutError, match=message):
        data_shard(*dims)


def test_dims_without_names_must_be_passed() -> None:
    """None is guessed."""
    with be(Layout.parse("2x2"), 3):
        assert data_shard(0) == data_shard("0") == (1, 2)
        with pytest.raises(MeshError, match=r"dims of mesh `2x2` .* have no names") as caught:
            data_shard()
    assert caught.value.hint is not None
    assert "data_shard(0)" in caught.value.hint


def test_a_process_without_a_rank_is_an_error() -> None:
    """A launcher that sets the number of ranks must also set this process's rank."""
    with be(Layout.parse("dp=2"), 0, RANK=""):
        assert current_layout().own_rank is None
        with pytest.raises(MeshError, match="does not define this process's rank"):
            data_shard()
