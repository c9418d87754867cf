"""Labels for several ranks together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.layout import Layout, solve_layout
from meshrun.layout.labels import merged_label, rank_label
from meshrun.layout.spec import parse_mesh
from tests.layouts import layouts


def numbers(text: str, size: int) -> set[int]:
    """Parse ``*`` or ``0-2,5``."""
    if text == "*":
        return set(range(size))
    pairs = [part.partition("-") for part in text.split(",")]
    return {n for first, _, last in pairs for n in range(int(first), int(last or first) + 1)}


def expand(layout: Layout, label: str) -> set[int]:
    """Return the ranks that a label stands for."""
    where, count = label.rsplit(" x", 1)
    if where == "all":
        found = set(range(layout.world_size))
    elif where.startswith("rank "):
        found = numbers(where.removeprefix("rank "), layout.world_size)
    else:
        words = zip(layout.mesh_dim_names or (), where.split(), layout.sizes, strict=True)
        wanted = [numbers(word.removeprefix(name), size) for name, word, size in words]
        found = {
            rank
            for rank in range(layout.world_size)
            if all(i in w for i, w in zip(layout.coordinate(rank), wanted, strict=True))
        }
    assert len(found) == int(count)
    return found


@given(layouts(), st.data())
def test_a_label_says_which_ranks(layout: Layout, data: st.DataObject) -> None:
    """Any set of ranks can be read from its label, whatever their order."""
    every = st.integers(0, layout.world_size - 1)
    chosen = data.draw(st.lists(every, min_size=1))
    label = merged_label(layout, chosen)

    if len(set(chosen)) == 1:
        assert label == rank_label(layout, chosen[0])
    else:
        assert expand(layout, label) == set(chosen)


@given(layouts(), st.data())
def test_a_product_is_labelled_by_its_dims(layout: Layout, data: st.DataObject) -> None:
    """All combinations of some indices are written as coordinates, with ``*`` for a whole dim."""
    picks = [data.draw(st.sets(st.integers(0, size - 1), min_size=1)) for size in layout.sizes]
    chosen = {
        rank
        for rank in range(layout.world_size)
        if all(i in p for i, p in zip(layout.coordinate(rank), picks, strict=True))
    }
    label = merged_label(layout, chosen)

    if len(chosen) == 1:
        assert label == rank_label(layout, min(chosen))
        return
    assert expand(layout, label) == chosen
    assert label.startswith("all ") == (len(chosen) == layout.world_size)
    if layout.mesh_dim_names is not None and len(chosen) < layout.world_size:
        whole = [1 < len(pick) == size for pick, size in zip(picks, layout.sizes, strict=True)]
        assert [word.endswith("*") for word in label.split()[:-1]] == whole


@pytest.mark.parametrize(
    ("mesh", "chosen", "label"),
    [
        ("dp=4,tp=4", range(8), "dp0-1 tp* x8"),
        ("dp=4,tp=4", [5], "dp1 tp1"),
        ("dp=4,tp=4", [0, 1, 4, 5, 12, 13], "dp0-1,3 tp0-1 x6"),
        ("dp=4,pp=1,tp=2", [2, 3], "dp1 pp0 tp* x2"),
        ("dp=4,tp=4", [7, 5, 6, 3, 0, 0], "rank 0,3,5-7 x5"),
        ("dp=4,tp=4", range(16), "all x16"),
        ("2x4", range(4), "rank 0-3 x4"),
        ("2x4", range(8), "all x8"),
        ("2x4", [7], "1,3"),
        ("1", [0], "0"),
        (None, [0, 1, 2, 3], "rank 0-3 x4"),
        (None, [3], "rank 3"),
        (None, range(8), "all x8"),
    ],
)
def test_a_label_reads_like_this(mesh: str | None, chosen: list[int], label: str) -> None:
    """As short as possible."""
    layout = solve_layout(parse_mesh(mesh) if mesh else None, nproc_per_node=None if mesh else 8)

    assert merged_label(layout, iter(chosen)) == label
