"""Equal lines of several ranks become one, and each rank's lines keep their order."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshrun.console.collapsing import COMING_NS, LONGEST_NS, WINDOW_NS, Group, LineMerger

steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, WINDOW_NS)),
    max_size=80,
)


def play(printed: list[tuple[int, bytes, int]], ranks: int = 4) -> list[Group]:
    merger = LineMerger(range(ranks))
    now_ns = 0
    shown: list[Group] = []
    for rank, line, waited_ns in printed:
        now_ns += waited_ns
        shown += merger.due(now_ns)
        shown += merger.add(rank, [line], now_ns)
    return shown + merger.flush()


@given(steps)
def test_every_line_counts_once_and_in_its_rank_s_order(
    printed: list[tuple[int, bytes, int]],
) -> None:
    """However lines are interleaved."""
    shown = play(printed)

    for rank in range(4):
        sent = [line for who, line, _ in printed if who == rank]
        assert [group.line for group in shown if rank in group.ranks] == sent
    assert Counter(len(group.ranks) == 0 for group in shown)[True] == 0


@given(steps)
def test_nothing_waits_longer_than_its_window(printed: list[tuple[int, bytes, int]]) -> None:
    """Then a line is due, even if another rank might still print it."""
    merger = LineMerger(range(5))  # the fifth rank never prints
    now_ns = 0
    for rank, line, waited_ns in printed:
        now_ns += waited_ns
        merger.due(now_ns)
        merger.add(rank, [line], now_ns)
    merger.due(now_ns + COMING_NS)

    assert merger.next_due_ns is None
    assert merger.flush() == []


def test_what_all_ranks_print_is_shown_at_once() -> None:
    """There is no other rank to wait for."""
    merger = LineMerger(range(2))

    assert merger.add(0, [b"a"], 0) == []
    assert merger.add(1, [b"a"], 0) == [Group(b"a", (0, 1))]


def test_own_lines_do_not_keep_shared_ones_apart() -> None:
    """Each rank prints its number between two lines that all print."""
    printed = [
        (rank, line, 0) for rank in range(4) for line in (b"begin", b"I am %d" % rank, b"end")
    ]
    shown = play(printed)

    assert shown[0] == Group(b"begin", (0, 1, 2, 3))
    assert shown[-1] == Group(b"end", (0, 1, 2, 3))
    assert sorted(group.ranks for group in shown[1:-1]) == [(0,), (1,), (2,), (3,)]


def test_a_rank_that_left_is_not_waited_for() -> None:
    """The lines of the others are shown at once."""
    merger = LineMerger(range(3))
    merger.add(2, [b"a"], 0)
    assert merger.add(0, [b"a"], 0) == []
    assert merger.leave(2) == []
    assert merger.leave(1) == [Group(b"a", (0, 2))]
    assert merger.add(0, [b"b"], 0) == [Group(b"b", (0,))]


def test_memory_is_bounded() -> None:
    """When too many lines are held back, the oldest are shown first."""
    merger = LineMerger(range(2))
    shown = [group for number in range(60_000) for group in merger.add(0, [b"%d" % number], 0)]

    assert [group.line for group in shown] == [b"%d" % number for number in range(len(shown))]
    assert 60_000 - 45_000 < len(shown) < 60_000


def test_lines_of_ranks_that_keep_pace_delay_no_other() -> None:
    """A rank's own line moves later, so that the next line can be shared."""
    printed = [(0, b"step 1", 0), (1, b"step 1", 0), (1, b"I am 1", 0), (0, b"I am 0", 0)]
    printed += [(0, b"step 2", 0), (1, b"step 2", 0)]

    assert play(printed, ranks=3) == [
        Group(b"step 1", (0, 1)),
        Group(b"I am 0", (0,)),
        Group(b"I am 1", (1,)),
        Group(b"step 2", (0, 1)),
    ]


def test_a_rank_that_catches_up_is_waited_for() -> None:
    """It prints the same lines as another, a little later; that one's are held back."""
    merger = LineMerger(range(2))
    lines = [b"step %d" % number for number in range(4000)]
    lag_ns = 2 * WINDOW_NS
    merger.begin(0)
    shown = merger.add(0, lines, 0)
    assert merger.is_ahead(0, lag_ns)
    assert not merger.is_ahead(1, lag_ns)
    for number, line in enumerate(lines):
        shown += merger.add(1, [line], lag_ns + number * WINDOW_NS // 1000)

    assert shown == [Group(line, (0, 1)) for line in lines]
    assert not merger.is_ahead(0, lag_ns)


def test_a_rank_is_not_held_back_for_others_that_print_something_else() -> None:
    """And its lines wait no longer than the window."""
    merger = LineMerger(range(2))
    merger.add(0, [b"%d" % number for number in range(4000)], LONGEST_NS)

    assert not merger.is_ahead(0, LONGEST_NS)
    assert merger.next_due_ns == LONGEST_NS + WINDOW_NS
