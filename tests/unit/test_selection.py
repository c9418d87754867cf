"""Which ranks a selection such as ``dp=0,tp=1-3`` means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import SpecError
from meshrun.layout import Layout, solve_layout
from meshrun.layout.selection import select_ranks
from meshrun.layout.spec import parse_mesh
from tests.layouts import layouts

ranges = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3)


def layout_of(mesh: str, nodes: int = 1) -> Layout:
    return solve_layout(parse_mesh(mesh), nnodes=nodes)


def error_of(layout: Layout, text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        select_ranks(layout, text)
    return caught.value


def places(layout: Layout, rank: int) -> dict[str, int]:
    """Return everything by which a selection can find a rank."""
    keys = layout.mesh_dim_names or [str(dim) for dim in range(len(layout.sizes))]
    dims = dict(zip(keys, layout.coordinate(rank), strict=True))
    return {**dims, "rank": rank, "local_rank": layout.local_rank(rank)}


@given(st.data())
def test_a_text_means_the_ranks_that_meet_every_condition(data: st.DataObject) -> None:
    """The same as a check of each rank's coordinates, for any combination of conditions."""
    layout = data.draw(layouts())
    all_places = {rank: places(layout, rank) for rank in range(layout.world_size)}
    keys = data.draw(st.lists(st.sampled_from(sorted(all_places[0])), min_size=1, unique=True))
    wanted: dict[str, set[int]] = {}
    words = []
    for key in keys:
        most = max(at[key] for at in all_places.values())
        pairs = [sorted((min(a, most), min(b, most))) for a, b in data.draw(ranges)]
        wanted[key] = {index for a, b in pairs for index in range(a, b + 1)}
        space = data.draw(st.sampled_from(["", " "]))
        written = [f"{a}{space}-{space}{b}" if a < b else f"{a}" for a, b in pairs]
        words.append(f"{key}{space}={space}" + f"{space},{space}".join(written))

    assert select_ranks(layout, ",".join(words)) == {
        rank
        for rank, at in all_places.items()
        if all(at[key] in indices for key, indices in wanted.items())
    }


@given(layouts(), st.text(alphabet="dptrank_local=,-:0123 é\n", max_size=24))
def test_any_text_is_a_set_of_ranks_or_one_clear_error(layout: Layout, text: str) -> None:
    """Any text gives ranks of the world or an error that points into the text."""
    try:
        ranks = select_ranks(layout, text)
    except SpecError as error:
        assert error.text == text
        assert 0 <= error.position <= len(text)
        assert error.position + error.length <= max(len(text), error.position + 1)
        assert error.hint
    else:
        assert ranks <= set(range(layout.world_size))


def test_a_bare_index_belongs_to_the_dim_before_it() -> None:
    """In ``tp=0,2-3`` only the first index has its dim in front."""
    layout = layout_of("dp=2,tp=4")

    assert select_ranks(layout, "tp=0,2-3,dp=1") == {4, 6, 7}
    assert select_ranks(layout, "rank=0,3") == {0, 3}


def test_a_local_rank_is_on_every_node() -> None:
    """It selects one rank of each node that has so many."""
    assert select_ranks(layout_of("dp=2,tp=4", nodes=4), "local_rank=0") == {0, 2, 4, 6}
    assert select_ranks(Layout(mesh=None, nproc_per_node=(3, 1)), "local_rank=1-2") == {1, 2}


def test_dims_without_names_go_by_index() -> None:
    """The dims of a mesh with names go by name only."""
    assert select_ranks(layout_of("2x4"), "0=1") == {4, 5, 6, 7}
    assert error_of(layout_of("dp=2,tp=4"), "0=1").message == "mesh `dp=2,tp=4` has no dim `0`"
    assert error_of(layout_of("2x4"), "0").message == "`0` names no dim"


def test_a_dim_hides_a_word_of_the_same_name() -> None:
    """A mesh may have a dim called ``rank``."""
    layout = layout_of("rank=2,tp=4")

    assert select_ranks(layout, "rank=1") == {4, 5, 6, 7}
    assert error_of(layout, "rank=2").message == "dim `rank` has no index 2: its size is 2"


def test_conditions_may_exclude_each_other() -> None:
    """No rank meets both, which is not an error."""
    assert select_ranks(layout_of("dp=2,tp=4"), "dp=1,rank=0") == frozenset()


def test_an_index_of_a_large_mesh() -> None:
    """An index of the fastest dim is spread over the whole world."""
    layout = layout_of("dp=256,pp=8,tp=8", nodes=2048)

    assert select_ranks(layout, "tp=3") == set(range(3, 16_384, 8))
    assert select_ranks(layout, "local_rank=3") == set(range(3, 16_384, 8))


@pytest.mark.parametrize(
    ("text", "message", "wrong", "hint"),
    [
        ("", "expected ranks, found nothing", "", "write `dp=0`, `tp=0`, `rank=0` or"),
        ("  ", "expected ranks, found nothing", "", "write `dp=0`, `tp=0`, `rank=0` or"),
        (
            "dp=0,pt=1",
            "mesh `dp=2,tp=4` has no dim `pt`",
            "pt",
            "did you mean `tp`? use `dp`, `tp`, ",
        ),
        ("DP=0", "mesh `dp=2,tp=4` has no dim `DP`", "DP", "use `dp`, `tp`, `rank` or"),
        ("=0", "missing dim", "", "write `dp=0`"),
        ("tp=1-4", "dim `tp` has no index 4: its size is 4", "4", "`tp` ranges from 0 to 3"),
        ("rank=2,8", "no rank 8 in a world of 8", "8", "`rank` ranges from 0 to 7"),
        ("local_rank=9", "no local rank 9: nodes have at most 4 workers", "9", "0 to 3"),
        ("rank=" + "9" * 5000, "no rank 99999", "9" * 5000, "`rank` ranges from 0 to 7"),
        ("tp=3 - 1", "range `3 - 1` is reversed", "3 - 1", "`1-3`"),
        ("dp=0,tp=1,dp=1", "`dp` is given twice", "dp=1", "`dp=0,2-3`"),
        ("dp=", "missing index", "", "write `dp=0`"),
        ("dp=0,", "missing index", "", "write `dp=0`"),
        ("dp=0,tp", "`tp` has no index", "tp", "for example: `tp=0`"),
        ("0-3", "`0-3` names no dim", "0-3", "did you mean `rank=0-3`?"),
        ("0, 2-3", "`0` names no dim", "0", "did you mean `rank=0,2-3`?"),
        ("0,tp=1", "`0` names no dim", "0", "did you mean `rank=0`?"),
        ("dp=x", "`x` is not an index or range of `dp`", "x", "write `dp=0`"),
        ("dp=-1", "`-1` is not an index or range of `dp`", "-1", "write `dp=0`"),
        ("dp=²", "`²` is not an index or range of `dp`", "²", "write `dp=0`"),
        ("dp1 tp3", "`dp1 tp3` is not an index or range of a dim", "dp1 tp3", "`dp=1,tp=3`"),
        (
            "local_rank:0-1",
            "`local_rank:0-1` is not an index",
            "local_rank:0-1",
            "`local_rank=0-1`",
        ),
        ("nonsense", "`nonsense` is not an index or range of a dim", "nonsense", "write `dp=0`"),
    ],
)
def test_a_mistake_is_shown_where_it_is(text: str, message: str, wrong: str, hint: str) -> None:
    """The message has the numbers, the position is that of the mistake, and the hint helps."""
    error = error_of(layout_of("dp=2,tp=4", nodes=2), text)

    assert message in error.message
    assert hint in (error.hint or "")
    assert text[error.position :].startswith(wrong)
    assert error.position == text.rfind(wrong) if wrong else error.length == 1


def test_without_a_mesh_there_are_no_dims() -> None:
    """The error says so, and what to use instead."""
    layout = Layout(mesh=None, nproc_per_node=(1,))
    error = error_of(layout, "dp=0")

    assert error.message == "there is no mesh and so no dim `dp`"
    assert error.hint == "use `rank` or `local_rank`"
    assert error_of(layout, "rank=1").hint == "`rank` is always 0"
