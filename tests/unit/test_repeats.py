"""Equal output of ranks that fail is printed once, and no other output is lost."""

from hypothesis import given
from hypothesis import strategies as st

from meshrun.console.repeats import AHEAD_NS, WAIT_NS, Repeats

USAGE, WRONG = b"usage: x.py [-h]\n", b"x.py: error: --lr is required\n"


def test_equal_failures_of_ranks_are_shown_once() -> None:
    """However the output is split, and whether a rank's end or its last output is read first."""
    repeats = Repeats()

    assert repeats.take(0, USAGE, 0) == USAGE
    assert repeats.take(2, USAGE, 0) == b""
    assert repeats.take(0, WRONG, 0) == WRONG
    assert repeats.take(1, USAGE + WRONG, 0) == b""
    assert repeats.end(0, failed=True) == b""
    assert repeats.end(1, failed=True) == b""
    assert repeats.end(2, failed=True) == b""
    assert repeats.take(2, WRONG, 0) == b""
    assert repeats.end(3, failed=True) == b""
    assert repeats.take(3, USAGE + b"x.py: error: another\n", 0) == (
        USAGE + b"x.py: error: another\n"
    )
    assert repeats.next_due_ns is None


def test_a_rank_that_overtakes_the_first_does_not_repeat_it() -> None:
    """What both print is shown once, even if the first rank prints it later."""
    repeats = Repeats()

    assert repeats.take(0, USAGE, 0) == USAGE
    assert [repeats.take(rank, USAGE, 0) for rank in (1, 2, 3, 4)] == [b""] * 4
    assert [repeats.take(rank, WRONG, 0) for rank in (1, 2, 3)] == [b""] * 3
    assert repeats.end(1, failed=True) == WRONG
    assert repeats.end(2, failed=True) == b""
    assert repeats.take(0, WRONG, 0) == b""
    assert [repeats.end(rank, failed=True) for rank in (0, 3, 4)] == [b""] * 3


def test_a_rank_that_overtakes_the_first_is_not_held_for_long() -> None:
    """Its further output is shown as its own, unless the first rank prints the same in time."""
    repeats = Repeats()
    repeats.take(0, USAGE, 0)

    assert repeats.take(1, USAGE + b"other\n", 0) == b""
    assert repeats.take(2, USAGE + WRONG, 0) == b""
    assert repeats.take(0, WRONG, 0) == WRONG
    assert repeats.next_due_ns == AHEAD_NS
    assert repeats.due(AHEAD_NS) == {1: USAGE + b"other\n"}
    assert repeats.next_due_ns == WAIT_NS


def test_output_of_a_rank_that_keeps_running_is_shown() -> None:
    """Before its next output, when it succeeds, or after a while."""
    warning = b"a warning\n"
    repeats = Repeats()
    repeats.take(0, warning, 0)
    held = [repeats.take(rank, warning, 0) for rank in (1, 2, 3, 4, 5)]

    assert held == [b""] * 5
    assert repeats.take(5, warning, WAIT_NS // 2) == warning
    assert repeats.release(5) == warning
    assert repeats.take(1, b"more\n", 0) == b""
    assert repeats.due(AHEAD_NS) == {1: b"a warning\nmore\n"}
    assert repeats.release(2) == warning
    assert repeats.end(3, failed=False) == warning
    assert repeats.due(WAIT_NS - 1) == {}
    assert repeats.due(WAIT_NS) == {4: warning}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([b"a\n", b"b\n", b"a\nb\n", b"?", b"5%\r", b"c\n" * 3000]),
            st.integers(0, WAIT_NS),
        )
    )
)
def test_no_output_of_ranks_that_succeed_is_lost(outputs: list[tuple[int, bytes, int]]) -> None:
    """Each rank's output is printed whole and in order."""
    repeats, now_ns = Repeats(), 0
    printed = dict.fromkeys(range(3), b"")
    for rank, text, waited_ns in outputs:
        now_ns += waited_ns
        for rank_due, due in repeats.due(now_ns).items():
            printed[rank_due] += due
        printed[rank] += repeats.take(rank, text, now_ns)
    for rank in range(3):
        printed[rank] += repeats.end(rank, failed=False)

    assert printed == {
        rank: b"".join(text for other, text, _ in outputs if other == rank) for rank in range(3)
    }
