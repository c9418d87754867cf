"""Lists of nodes and of counts, as Slurm shortens them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.cluster.batch import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sl0", ["sl0"]),
        ("sl[1-3,7],gpu-a[01-03]", ["sl1", "sl2", "sl3", "sl7", "gpu-a01", "gpu-a02", "gpu-a03"]),
        ("r[0-1]n[08-10]", ["r0n08", "r0n09", "r0n10", "r1n08", "r1n09", "r1n10"]),
        ("b,a[9-11]x", ["b", "a9x", "a10x", "a11x"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    """In order, with leading zeros."""
    assert expand_hosts(text) == tuple(names)


def test_a_list_of_counts_has_one_per_node() -> None:
    """One for each node."""
    assert expand_counts("2,1(x2)") == (2, 1, 1)
    assert expand_counts("16(x3)") == (16, 16, 16)


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a[", "a]", "a[1-", "a[]", "a[3-1]", "a[1-2", "a[0-999999999]", "a b",
             "a[0-999][0-999]", "a[[1]]"]
)  # fmt: skip
def test_text_that_is_not_a_node_list_is_refused(text: str) -> None:
    """As is one of more nodes than there can be."""
    with pytest.raises(ValueError, match=r"not a|no range|is reversed|more than"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["", "2(", "2(x)", "2(x-1)", "x", "1,", "1(x999999999)", "1,,2"])
def test_text_that_is_not_a_list_of_counts_is_refused(text: str) -> None:
    """As is one of more nodes than there can be."""
    with pytest.raises(ValueError, match=r"not a|no range|is reversed|more than"):
        expand_counts(text)


@given(st.text("abc01-[],x() ", max_size=20))
def test_any_text_is_expanded_or_a_value_error(text: str) -> None:
    for expand in (expand_hosts, expand_counts):
        try:
            assert len(expand(text)) >= 1
        except ValueError:
            pass


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_shortened_counts_are_expanded(counts: list[int]) -> None:
    """Shortened as Slurm does it."""
    words: list[list[int]] = []
    for count in counts:
        if words and words[-1][0] == count:
            words[-1][1] += 1
        else:
            words.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in words)

    assert expand_counts(text) == tuple(counts)
