"""The form of a layout's answers, and its errors."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshrun.errors import LayoutError, UsageError
from meshrun.layout import Layout
from meshrun.layout.spec import parse_mesh


def test_coordinates_have_names_and_stay_tuples() -> None:
    """They compare, unpack and pickle as plain tuples, whatever the names of dims."""
    coordinate = Layout.parse("dp=2,tp=4").coordinate(7)
    odd = Layout.parse("index=2,class=2,__len__=2").coordinate(5)

    assert (coordinate.dp, coordinate.tp, coordinate[1]) == (1, 3, 3)
    assert coordinate == (1, 3)
    assert repr(coordinate) == "Coordinate(dp=1, tp=3)"
    assert json.dumps(coordinate) == "[1, 3]"
    assert type(pickle.loads(pickle.dumps(coordinate))) is tuple
    assert (odd.index(1), getattr(odd, "class"), len(odd)) == (0, 0, 3)
    assert repr(Layout.parse("2x4").coordinate(7)) == "(1, 3)"
    with pytest.raises(AttributeError):
        _ = coordinate.pp


def test_a_layout_is_the_same_after_a_restart() -> None:
    """A layout from an earlier generation's checkpoint equals the current one."""
    mesh = parse_mesh("dp=2,tp=4")
    before = Layout(mesh=mesh, nproc_per_node=(8,), generation=1, own_rank=3)
    now = Layout(mesh=mesh, nproc_per_node=[8], generation=4)  # type: ignore[arg-type]

    assert Layout.from_dict(before.to_dict()) == now
    assert {before, now} == {now}
    assert Layout.from_dict(before.to_dict()).generation == 1


def test_a_dim_may_have_any_name() -> None:
    """Even a parameter's."""
    layout = Layout.parse("self=2,coordinate=2,rank=2")

    assert layout.ranks(self=1, rank=0) == range(4, 8, 2)
    assert layout.rank(self=1, coordinate=0, rank=1) == 5


@pytest.mark.parametrize(
    ("spec", "rank", "label"),
    [
        ("dp=16,tp=4", 7, "dp01_tp3"),
        ("dp=1,tp=101", 7, "dp0_tp007"),
        ("16x4", 7, "01_3"),
        ("ep_2=2,dp=2", 3, "ep_2-1_dp1"),
        (None, 7, "rank07"),
    ],
)
def test_labels_have_one_width(spec: str | None, rank: int, label: str) -> None:
    """So file names sort in the order of ranks."""
    layout = Layout.parse(spec, nproc_per_node=None if spec else 12)
    labels = [layout.label(at) for at in range(layout.world_size)]

    assert layout.label(rank) == label
    assert sorted(set(labels)) == labels
    assert len({len(text) for text in labels}) == 1


def test_dims_without_names_go_by_index() -> None:
    """As a number, or as the text in ``shape``."""
    layout = Layout.parse("2x4", nnodes=2)

    assert layout.shape == {"0": 2, "1": 4}
    assert layout.group("1", 5) == layout.group(1, 5) == range(4, 8)
    assert (layout.dim("1"), layout.dim(1), layout.size()) == (1, 1, 8)


def test_several_values_come_as_one_text_or_as_a_list() -> None:
    """A text is not taken for a list of letters."""
    one = Layout.parse("2x4", names="dp,tp", flatten="dp+tp;x=dp+tp", views="v:a=8")
    many = Layout.parse("2x4", names=["dp", "tp"], flatten=["dp+tp", "x=dp+tp"], views=["v:a=8"])

    assert one == many
    assert (one.shape, one.size("x"), one.size("a")) == ({"dp": 2, "tp": 4}, 8, 8)


def test_without_a_mesh_there_are_nodes_and_ranks() -> None:
    """And no dims."""
    layout = Layout.parse(None, nnodes=2, nproc_per_node=2)

    assert (layout.shape, layout.coordinate(3), layout.slot(3)) == ({}, (), (1, 1))
    assert Layout.from_dict(layout.to_dict()) == layout
    with pytest.raises(LayoutError, match="no dim `dp`") as caught:
        layout.size("dp")
    assert caught.value.message == "there is no mesh and so no dim `dp`"


def test_a_layout_without_an_own_rank_needs_one() -> None:
    """Such as a layout of another launch."""
    layout = Layout.parse("dp=2,tp=4")
    asks = [
        layout.coordinate, layout.node_rank, layout.local_rank, layout.slot, layout.label,
        lambda: layout.rank(dp=1), lambda: layout.group("dp"), lambda: layout.dim_rank("dp"),
        lambda: layout.neighbor("dp", 1), lambda: layout.is_first("dp"),
        lambda: layout.is_last("dp"), lambda: layout.source("dp"), lambda: layout.map_to([0]),
    ]  # fmt: skip
    for ask in asks:
        with pytest.raises(LayoutError, match="this layout does not belong to a rank"):
            ask()


@pytest.mark.parametrize(
    ("ask", "message", "hint"),
    [
        (
            lambda layout: layout.rank((2, 0)),
            "coordinate (2, 0) is outside mesh `dp=2,tp=4`",
            "`dp` ranges from 0 to 1",
        ),
        (
            lambda layout: layout.rank((0,)),
            "coordinate (0,) has 1 dim, but mesh `dp=2,tp=4` has 2",
            "to fix only some dims, name them: rank(dp=1)",
        ),
        (
            lambda layout: layout.rank((0, 0), tp=1),
            "expected a coordinate or indices by dim, found both",
            "pass one of them",
        ),
        (
            lambda layout: layout.rank(dp=0, tp=4),
            "dp=0, tp=4 is outside mesh `dp=2,tp=4`",
            "`tp` ranges from 0 to 3",
        ),
        (
            lambda layout: layout.ranks(dp=-1),
            "dp=-1 is outside mesh `dp=2,tp=4`",
            "`dp` ranges from 0 to 1",
        ),
        (
            lambda layout: layout.ranks(ep=[0, 8]),
            "ep=[0, 8] is outside mesh `dp=2,tp=4`",
            "`ep` ranges from 0 to 7",
        ),
        (
            lambda layout: layout.rank(dp=1, ep=0),
            "the dims of dp=1, ep=0 overlap, so their indices do not identify one rank",
            "use ranks(), which returns the ranks at all of them",
        ),
        (
            lambda layout: layout.ranks(pp=0),
            "mesh `dp=2,tp=4` has no dim `pp`",
            "use `dp`, `tp`, `ep`",
        ),
        (lambda layout: layout.dim("pp"), "mesh `dp=2,tp=4` has no dim `pp`", None),
        (
            lambda layout: layout.dim("ep"),
            "dim `ep` is not one of the mesh's own dims",
            "use `dp`, `tp`",
        ),
        (lambda layout: layout.slot(8), "rank 8 is outside a world of 8", None),
        (
            lambda layout: layout.rank_at(2, 0),
            "node 2 does not exist",
            "nodes range from 0 to 1",
        ),
        (
            lambda layout: layout.rank_at(0, 4),
            "node 0 has no local rank 4",
            "its local ranks range from 0 to 3",
        ),
        (
            lambda _: Layout(mesh=None, nproc_per_node=(1,), own_rank=1),
            "rank 1 is outside a world of 1",
            None,
        ),
    ],
)
def test_what_does_not_exist_is_an_error(
    ask: Callable[[Layout], object], message: str, hint: str | None
) -> None:
    """There is no wrap-around and no guess; the hint says what exists."""
    with pytest.raises(LayoutError) as caught:
        ask(Layout.parse("dp=2,tp=4", nnodes=2, views=["moe:ep=8"]))
    assert caught.value.message == message
    if hint:
        assert caught.value.hint == hint


@pytest.mark.parametrize("number", [np.int64, np.uint8, int])
def test_numbers_of_other_libraries_give_plain_ones(number: type) -> None:
    """Results can be written as JSON, and do not overflow."""
    layout = Layout.parse("dp=200,tp=2", flatten=["dp+tp"])
    one = number(1)
    found = [
        layout.rank(dp=one, tp=one), layout.rank([one, one]), list(layout.ranks(dp=one, tp=[one])),
        layout.neighbor("dp", 199, one), layout.dim_rank("dp_tp", one), layout.slot(one),
        layout.coordinate(one), list(layout.group("dp", one))[:2], layout.source("tp", one),
    ]  # fmt: skip

    assert json.dumps(found) == "[3, 3, [3], 399, 1, [0, 1], [0, 1], [1, 3], 0]"
    for wrong in (1.0, np.float64(1), "1"):
        with pytest.raises(TypeError, match="integer"):
            layout.rank(dp=wrong, tp=0)
        with pytest.raises(TypeError, match="integer"):
            layout.coordinate(wrong)


@pytest.mark.parametrize(
    ("mesh", "counts", "message"),
    [
        ("dp=2,tp=4", (8, 4), "mesh `dp=2,tp=4` has 8 ranks, but 2 nodes have 12 workers"),
        ("dp=2,tp=4", (4,), "mesh `dp=2,tp=4` has 8 ranks, but 1 node has 4 workers"),
        ("dp=-1,tp=4", (8,), "mesh `dp=-1,tp=4` has a size of -1"),
        (None, (), "expected at least one node"),
        (None, (0, 0), "numbers of workers cannot be negative or all 0: node 0 has 0"),
        ("8", (12, -4), "numbers of workers cannot be negative or all 0: node 1 has -4"),
    ],
)
def test_a_mesh_fills_its_nodes(mesh: str | None, counts: tuple[int, ...], message: str) -> None:
    """No rank is left over or missing; the same holds for a layout from a file."""
    with pytest.raises(LayoutError) as caught:
        Layout(mesh=parse_mesh(mesh) if mesh else None, nproc_per_node=counts)
    with pytest.raises(LayoutError) as from_file:
        Layout.from_dict({"mesh": mesh, "nproc_per_node": list(counts)})
    assert caught.value.message == from_file.value.message == message


@pytest.mark.parametrize(
    ("mesh", "options", "message", "hint"),
    [
        (
            "1",
            {"nnodes": 2},
            "mesh `1` needs 1 worker, which does not divide evenly over 2 nodes (1 / 2 = 0.5)",
            "use --nnodes 1",
        ),
        (
            "2",
            {"nproc_per_node": 1},
            "mesh `2` needs 2 workers, but 1 node x 1 worker gives 1",
            "use `1` for 1 worker, or --nproc-per-node 2 for 2, or --nnodes 2 for 2",
        ),
        ("2", {"views": "v:a=1"}, "view `v` needs 1 worker, but the mesh has 2", None),
    ],
)
def test_errors_distinguish_singular_and_plural(
    mesh: str, options: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        Layout.parse(mesh, **options)
    assert caught.value.message == message
    if hint:
        assert caught.value.hint == hint


def test_nodes_may_differ() -> None:
    """Their numbers of workers are a list, as to_dict() writes it."""
    layout = Layout.from_dict({"mesh": "dp=3,tp=4", "nproc_per_node": [8, 4]}, own_rank=9)

    assert (layout.slot(), layout.coordinate()) == ((1, 1), (2, 1))
    assert [layout.crosses_nodes(dim) for dim in layout.shape] == [True, False]
    assert layout.to_dict()["nproc_per_node"] == [8, 4]
    assert Layout.from_dict(layout.to_dict()) == layout


@pytest.mark.parametrize(
    ("values", "lacks"),
    [
        ({}, "no 'nproc_per_node'"),
        ({"nproc_per_node": 2}, "no 'mesh'"),
        ({"mesh": "dp=2", "nproc_per_node": 2}, "no 'nnodes'"),
        ({"mesh": "dp=2", "nproc_per_node": None}, "not iterable"),
        ({"mesh": 2, "nproc_per_node": [2]}, "'int' object"),
        ({"mesh": "dp=2", "nproc_per_node": [2], "slot_order": 3}, "not iterable"),
        ([], "must be integers"),
    ],
)
def test_invalid_layouts_are_errors(values: Any, lacks: str) -> None:
    """A file that another program wrote gives an error that says what is missing."""
    with pytest.raises(LayoutError, match="not the values of a layout") as caught:
        Layout.from_dict(values)
    assert lacks in caught.value.message
