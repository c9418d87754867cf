"""Parsing and formatting of mesh specs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import SpecError
from meshrun.layout.spec import AnyMesh, MeshSpec, format_mesh, mesh_text, parse_mesh

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
sizes = st.lists(st.integers(1, 4096), min_size=1, max_size=6)


@st.composite
def specs(draw: st.DrawFn) -> MeshSpec:
    chosen = draw(sizes)
    if draw(st.booleans()):
        chosen[draw(st.integers(0, len(chosen) - 1))] = -1
    labels = None
    if draw(st.booleans()):
        unique = st.lists(names, min_size=len(chosen), max_size=len(chosen), unique=True)
        labels = tuple(draw(unique))
    return MeshSpec(sizes=tuple(chosen), mesh_dim_names=labels)


@given(specs())
def test_parse_and_format_are_inverses(spec: MeshSpec) -> None:
    assert parse_mesh(format_mesh(spec)) == spec


@given(specs())
def test_both_spellings_mean_the_same(spec: MeshSpec) -> None:
    """Sizes with --names are the same mesh as named sizes."""
    if spec.mesh_dim_names is not None:
        sizes = "x".join(str(size) for size in spec.sizes)

        assert parse_mesh(sizes, ",".join(spec.mesh_dim_names)) == spec


@given(st.text(alphabet="dptx=,:-0123 _é\n", max_size=24), st.none() | st.text(max_size=12))
def test_any_text_is_a_mesh_or_one_clear_error(text: str, names: str | None) -> None:
    """Any text gives a spec or an error that points into the text."""
    try:
        spec = parse_mesh(text, names)
    except SpecError as error:
        assert error.text in (text, names)
        assert 0 <= error.position <= len(error.text)
        assert error.hint
    else:
        assert parse_mesh(format_mesh(spec)) == spec


def test_spaces_around_dims_are_allowed() -> None:
    """A mesh quoted with spaces is the same mesh."""
    assert parse_mesh(" dp = 2 , tp=4 ") == parse_mesh("dp=2,tp=4")


def test_names_keep_their_case() -> None:
    """As torch compares names with their case."""
    assert parse_mesh("DP=2,dp=4").mesh_dim_names == ("DP", "dp")


@pytest.mark.parametrize("name", ["dp", "_", "ep_2", "DP"])
def test_a_dim_may_be_named(name: str) -> None:
    """With any identifier."""
    assert parse_mesh("2", name).mesh_dim_names == (name,)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("(2,4)", "2x4"), ("[2, 4]", "2x4"), ("2*4", "2x4"), ("2X4", "2x4"), ("2 4", "2x4"),
        ("(2,-1)", "2x-1"), ("dp=2 tp=4", "dp=2,tp=4"), ("dp=2xtp=4", "dp=2,tp=4"),
        ("dp=2;tp=4", "dp=2,tp=4"), ("(dp=2,tp=4)", "dp=2,tp=4"), ("dp2tp4", "dp=2,tp=4"),
        ("dp: 2, tp: 4", "dp=2,tp=4"), ("{'dp': 2, 'tp': -1}", "dp=2,tp=-1"),
        ("ep_2=4 tp=2", "ep_2=4,tp=2"),
    ],
)  # fmt: skip
def test_what_was_meant_is_hinted_at(text: str, meant: str) -> None:
    """Spellings as in numpy, Python, other tools and shells are recognized."""
    with pytest.raises(SpecError) as caught:
        parse_mesh(text)

    assert caught.value.hint == f"write `{meant}`"


@pytest.mark.parametrize("text", ["dp=two", "2.5", "(2,0)", "dp-2", "=2", "9" * 300 + ","])
def test_no_guess_is_better_than_a_bad_one(text: str) -> None:
    """The hint then says how a mesh is written."""
    with pytest.raises(SpecError) as caught:
        parse_mesh(text)

    assert " such as " in str(caught.value.hint)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"dp": 2, "tp": -1}, "dp=2,tp=-1"), ((2, 4), "2x4"), ([8], "8"), (8, "8"),
        ("dp=2", "dp=2"), ({}, ""), ((), ""),
    ],
)  # fmt: skip
def test_a_mesh_may_be_a_value(mesh: AnyMesh, text: str) -> None:
    """Programs may already have a dict or a shape."""
    assert mesh_text(mesh) == text
