"""Flattened dims and views: their syntax, how they fit a mesh, and their groups."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import LayoutError, SpecError
from meshrun.layout import Layout
from meshrun.layout.derived import (
    Flatten,
    View,
    derive,
    format_derived,
    parse_derived,
    parse_flatten,
    parse_view,
)
from meshrun.layout.spec import MeshSpec, parse_mesh

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
several = st.lists(names, min_size=2, max_size=4, unique=True).map(tuple)
flattens = st.builds(Flatten, name=names, dims=several)


@st.composite
def views(draw: st.DrawFn) -> View:
    labels = draw(several)
    sizes = draw(st.lists(st.integers(1, 99), min_size=len(labels), max_size=len(labels)))
    if draw(st.booleans()):
        sizes[0] = -1
    return View(name=draw(names), mesh=MeshSpec(sizes=tuple(sizes), mesh_dim_names=labels))


@given(flattens, views())
def test_parse_and_format_are_inverses(flatten: Flatten, view: View) -> None:
    """Every value can be parsed from its own text."""
    assert parse_flatten(str(flatten)) == flatten
    assert parse_view(str(view)) == view


@given(st.lists(flattens, max_size=3).map(tuple), st.lists(views(), max_size=3).map(tuple))
def test_variables_carry_them(some: tuple[Flatten, ...], others: tuple[View, ...]) -> None:
    """They survive the environment; an empty list sets no variable."""
    env = format_derived(some, others)
    again = parse_derived([env.get("MESHRUN_FLATTEN", "")], [env.get("MESHRUN_VIEW", "")])

    assert again == (some, others)
    assert all(env.values())


@given(st.text(alphabet="dptx=+:-012, _é\n", max_size=24))
def test_any_text_is_a_value_or_one_clear_error(text: str) -> None:
    """The error points into the text."""
    for parse in (parse_flatten, parse_view):
        try:
            value = parse(text)
        except SpecError as error:
            assert error.text == text
            assert 0 <= error.position <= len(text)
            assert error.hint
        else:
            assert parse(str(value)) == value


def test_short_forms_and_spaces() -> None:
    """The default name is torch's."""
    assert parse_flatten(" dp + cp ") == parse_flatten("dp_cp=dp+cp")
    assert parse_view(" moe : pp = 2 , ep=-1 ") == parse_view("moe:pp=2,ep=-1")


@pytest.mark.parametrize(
    ("text", "message", "caret"),
    [
        ("dp", "cannot flatten a single dim", "^^"),
        ("a=dp", "cannot flatten a single dim", "  ^^"),
        ("dp+", "missing name", "   ^"),
        ("", "missing name", "^"),
        ("=dp+cp", "missing name", "^"),
        ("dp+c-p", "`c-p` is not a valid name", "    ^"),
        ("2x=dp+cp", "`2x` is not a valid name", "^"),
        ("dp+dp", "dim `dp` appears twice", "   ^^"),
    ],
)
def test_a_wrong_flatten_is_pointed_at(text: str, message: str, caret: str) -> None:
    """The caret is under the wrong part."""
    with pytest.raises(SpecError) as caught:
        parse_flatten(text)
    error = caught.value
    assert (error.message, " " * error.position + "^" * error.length) == (message, caret)


@pytest.mark.parametrize(
    ("text", "message", "caret"),
    [
        ("", "the view is empty", "^"),
        ("pp=2,ep=4", "`pp=2,ep=4` has no name", "^" * 9),
        (":pp=2", "missing name", "^"),
        ("m-e:pp=2", "`m-e` is not a valid name", " ^"),
        ("moe:", "the mesh is empty", "    ^"),
        ("moe:2x4", "the dims of a view need names", "    ^^^"),
        ("moe:pp=2,ep=0", "a size must be at least 1, found 0", " " * 12 + "^"),
        ("moe:pp=2,pp=2", "dim `pp` is named twice", " " * 9 + "^^"),
    ],
)
def test_a_wrong_view_is_pointed_at(text: str, message: str, caret: str) -> None:
    """Also if the mesh in it is wrong."""
    with pytest.raises(SpecError) as caught:
        parse_view(text)
    error = caught.value
    assert (error.message, " " * error.position + "^" * error.length) == (message, caret)
    assert "+" not in (error.hint or "")  # which is the syntax of --flatten


@pytest.mark.parametrize(
    ("flatten", "view", "message", "wrong"),
    [
        ("dp+xx", None, "mesh `pp=2,dp=2,tp=4` has no dim `xx`", "xx"),
        ("tp+dp", None, "dim `dp` is out of order", "dp"),
        ("tp=pp+dp", None, "dim `tp` already exists", "tp"),
        ("rank=pp+dp", None, "`rank` is a reserved name", "rank"),
        ("a=pp+dp;a=dp+tp", None, "dim `a` already exists", "a"),
        (None, "moe:pp=2,ep=4", "view `moe` needs 8 workers, but the mesh has 16", "pp=2,ep=4"),
        (
            None,
            "moe:ep=3,x=-1",
            "view `moe` needs a multiple of 3 workers, but the mesh has 16",
            "ep=3,x=-1",
        ),
        (None, "tp:a=16", "dim `tp` already exists", "tp"),
        (None, "a:a=16", "dim `a` already exists", "a"),
        (None, "v:local_rank=16", "`local_rank` is a reserved name", "local_rank"),
        (None, "v:a=16;v:b=16", "view `v` is defined twice", "v"),
        (
            None,
            "moe:ep=8,pp=2",
            "dim `pp` of view `moe` has groups {0,1} {2,3} .., but `pp` of the mesh has"
            " {0,8} {1,9} ..",
            "pp",
        ),
        (
            None,
            "v:tp=8,x=2",
            "dim `tp` of view `v` has groups {0,2,..,14} {1,3,..,15}, but `tp` of the mesh"
            " has {0,1,2,3} {4,5,6,7} ..",
            "tp",
        ),
        (None, "v:a=4,b=4;w:a=2,c=8", "but `a` of another derived dim has", "a"),
        ("a=pp+dp", "v:a=2,b=8", "but `a` of another derived dim has", "a"),
    ],
)
def test_what_does_not_fit_is_pointed_at(
    flatten: str | None, view: str | None, message: str, wrong: str
) -> None:
    """Names already in use, unknown dims, sizes that do not fit, conflicting groups."""
    with pytest.raises(SpecError) as caught:
        Layout.parse("pp=2,dp=2,tp=4", flatten=[flatten or ""], views=[view or ""])
    error = caught.value
    assert message in error.message
    assert error.text[error.position : error.position + error.length] == wrong
    assert error.hint


def test_derived_dims_need_a_mesh() -> None:
    """Without one, there are no dims to flatten."""
    with pytest.raises(LayoutError, match="require a mesh"):
        Layout.parse(None, nproc_per_node=2, flatten=["dp+cp"])
    with pytest.raises(SpecError, match="name the dims of the mesh"):
        Layout.parse("2x4", flatten=["dp+cp"])


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_flattened_dims_are_row_major(shape: list[int], data: st.DataObject) -> None:
    """Its index numbers the indices of its dims in row-major order, adjacent or not."""
    root = tuple("abcd"[: len(shape)])
    count = data.draw(st.integers(2, len(shape)))
    dims = data.draw(st.sampled_from(list(itertools.combinations(root, count))))
    mesh = MeshSpec(sizes=tuple(shape), mesh_dim_names=root)
    world_size = math.prod(shape)
    workers = data.draw(st.sampled_from([n for n in range(1, 9) if world_size % n == 0]))
    layout = Layout(
        mesh=mesh,
        nproc_per_node=(workers,) * (world_size // workers),
        flattens=(Flatten(name="x", dims=dims),),
        own_rank=data.draw(st.integers(0, world_size - 1)),
    )
    groups = list(layout.groups("x"))

    assert layout.size("x") == math.prod(layout.shape[dim] for dim in dims)
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        places = [tuple(layout.dim_rank(dim, rank) for dim in dims) for rank in group]
        assert places == sorted(places)
        assert list(group) == sorted(group)
        for place, rank in enumerate(group):
            assert layout.dim_rank("x", rank) == place
            assert layout.group("x", rank) == group
            assert layout.neighbor("x", 1, rank, wrap=True) == group[(place + 1) % len(group)]
            assert layout.source("x", rank) == group[0]
            assert rank in layout.ranks(x=place)
    crossing = sum(layout.crosses_nodes(group) for group in groups)
    assert layout.count_crossing("x") == crossing
    aligned = all(len({layout.local_rank(rank) for rank in group}) == 1 for group in groups)
    assert layout.rail_aligned("x") == aligned
    rank = layout.rank(x=layout.size("x") - 1)
    rest = [dim for dim in root if dim not in dims]
    assert [layout.dim_rank(dim, rank) for dim in rest] == [layout.dim_rank(dim) for dim in rest]


def test_a_view_is_another_mesh_of_the_same_ranks() -> None:
    """Its dims are those of a separate mesh; the mesh itself stays as it is."""
    layout = Layout.parse("pp=2,dp=2,tp=4", flatten=["dp+tp"], views=["moe:pp=2,efsdp=-1,ep=4"])
    alone = Layout.parse("pp=2,efsdp=2,ep=4")

    assert [str(view) for view in layout.views] == ["moe:pp=2,efsdp=2,ep=4"]
    for dim in ("pp", "efsdp", "ep"):
        assert list(layout.groups(dim)) == list(alone.groups(dim))
    assert layout.shape == {"pp": 2, "dp": 2, "tp": 4}
    assert layout.rank(pp=1, efsdp=1, ep=2) == 14
    assert Layout.from_dict(layout.to_dict()) == layout


def test_dims_that_overlap() -> None:
    """They may filter ranks, but cannot identify one."""
    layout = Layout.parse("dp=3,tp=4", flatten=["dp+tp"], views=["moe:a=6,b=2"])

    assert layout.ranks(tp=1, b=1) == [1, 5, 9]
    assert layout.ranks(tp=1, b=0) == []
    with pytest.raises(LayoutError, match="overlap"):
        layout.rank(tp=1, b=1)
    with pytest.raises(LayoutError, match="overlap"):
        layout.rank(dp=1, dp_tp=1)


def test_a_view_may_share_the_groups_of_flattened_dims() -> None:
    """If the names are equal, too."""
    mesh = parse_mesh("pp=2,dp=2,tp=4")
    found = derive(mesh, [parse_flatten("dp+tp")], [parse_view("v:pp=2,dp_tp=8")])[1]

    assert set(found) == {"dp_tp"}
