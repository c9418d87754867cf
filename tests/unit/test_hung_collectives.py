"""Which ranks wait in which collective, and why, from the calls of each rank."""

from __future__ import annotations

import pytest

from meshrun.layout import Layout
from meshrun.protocol import codec
from meshrun.protocol.collectives import Call, GroupCalls, RankCalled
from meshrun.supervisor.hung_collectives import describe_elsewhere, find_hung

WORLD = tuple(range(8))
TP0, TP1 = (0, 1, 2, 3), (4, 5, 6, 7)
PP = ((0, 4), (1, 5), (2, 6), (3, 7))


def layout() -> Layout:
    return Layout.parse("dp=2,tp=4", nproc_per_node=(8,))


def calls(*ops: str, done: int = 0) -> list[Call]:
    """Return calls from texts such as ``op:shape``; the first ``done`` have completed."""
    made = []
    for at, text in enumerate(ops):
        op, _, shape = text.partition(":")
        made.append(
            Call(number=at + 1, op=op, inputs=shape, outputs=shape, n_bytes=1024, is_done=at < done)
        )
    return made


def answered(by_rank: dict[int, dict[tuple[int, ...], list[Call]]]) -> dict[int, RankCalled]:
    return {
        rank: RankCalled(
            rank=rank,
            at_ns=0,
            groups=[
                GroupCalls(
                    name=str(ranks),
                    description="undefined",
                    ranks=list(ranks),
                    calls=made,
                )
                for ranks, made in groups.items()
            ],
        )
        for rank, groups in by_rank.items()
    }


IN, OUT = ("all_reduce", "all_reduce"), ("all_reduce",)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        pytest.param(
            {rank: {TP1: calls(*(OUT if rank == 6 else IN), done=1)} for rank in TP1},
            ["in the tp group {4-7}, ranks 4-5,7 wait in all_reduce #2, which rank 6 has"
             " not called"],
            id="a rank has not called it",
        ),
        pytest.param(
            {rank: {TP1: calls() if rank == 6 else calls(*OUT, done=0)} for rank in TP1},
            ["in the tp group {4-7}, ranks 4-5,7 wait in all_reduce #1, which rank 6 has"
             " not called"],
            id="a rank has called nothing yet",
        ),
        pytest.param(
            {
                rank: {TP1: calls("barrier", "all_gather" if rank == 6 else "all_reduce", done=1)}
                for rank in TP1
            },
            ["in the tp group {4-7}, the ranks call different collectives: "
             "#2 is all_reduce on ranks 4-5,7, all_gather on rank 6"],
            id="different collectives",
        ),
        pytest.param(
            {
                rank: {
                    TP1: calls("all_gather", done=0) if rank == 6 else calls(*IN, done=1)
                }
                for rank in TP1
            },
            ["in the tp group {4-7}, the ranks call different collectives: "
             "#1 is all_reduce on ranks 4-5,7, all_gather on rank 6"],
            id="different collectives, which the others have completed",
        ),
        pytest.param(
            {
                rank: {
                    TP0: calls("barrier", "all_gather", "all_reduce", done=1)
                    if rank
                    else calls("barrier", "all_reduce", "all_gather", done=1)
                }
                for rank in TP0
            },
            ["in the tp group {0-3}, the ranks call the same collectives in a different order: "
             "#2 is all_gather on ranks 1-3, all_reduce on rank 0"],
            id="another order",
        ),
        pytest.param(
            {
                rank: {TP0: calls(f"all_reduce:float32[{8 if rank == 2 else 4}]", done=0)}
                for rank in TP0
            },
            ["in the tp group {0-3}, the ranks call all_reduce #1 with different shapes or types: "
             "float32[4] on ranks 0-1,3, float32[8] on rank 2"],
            id="other shapes",
        ),
        pytest.param(
            {
                0: {TP0: calls(*OUT, done=0), PP[0]: calls()},
                4: {PP[0]: calls("broadcast", done=0)},
                1: {TP0: calls()}, 2: {TP0: calls(*OUT, done=0)}, 3: {TP0: calls(*OUT, done=0)},
            },
            ["in the tp group {0-3}, ranks 0,2-3 wait in all_reduce #1, which rank 1 has not"
             " called",
             "in the dp group {0,4}, rank 4 waits in broadcast #1, which rank 0 has not called"],
            id="the cause comes first",
        ),
        pytest.param(
            {rank: {WORLD: calls("barrier", done=0)} for rank in WORLD},
            ["in the group of all ranks, every rank is in barrier #1, which has not completed"],
            id="all ranks are in it",
        ),
        pytest.param(
            {rank: {TP0: calls("barrier", done=0)} for rank in (0, 1)},
            ["in the tp group {0-3}, ranks 0-1 wait in barrier #1, and ranks 2-3 do not answer"],
            id="ranks of another node",
        ),
        pytest.param(
            {rank: {(1, 2, 5): calls(f"all_to_all:float32[{rank}]", done=0)} for rank in (1, 2)},
            ["in the group {1-2,5}, ranks 1-2 wait in all_to_all #1, and rank 5 does not answer"],
            id="shapes that may differ",
        ),
        pytest.param({rank: {TP0: calls(*IN, done=2)} for rank in TP0}, [], id="no rank waits"),
    ],
)  # fmt: skip
def test_who_is_awaited(
    by_rank: dict[int, dict[tuple[int, ...], list[Call]]], expected: list[str]
) -> None:
    """The dim of the group, the ranks and the call; a mismatch comes before missing ranks."""
    assert [
        finding.summary for finding in find_hung(answered(by_rank), layout(), {}, own=WORLD)
    ] == expected


def test_lines_of_the_program_are_shown() -> None:
    """Where each rank is; ranks on the same line are grouped."""
    answers = answered({rank: {TP1: calls(*(OUT if rank == 6 else IN), done=1)} for rank in TP1})
    places = dict.fromkeys((4, 5, 7), "all_reduce at train.py:41")
    (found,) = find_hung(answers, layout(), {**places, 6: "data.py:9 in load"}, own=WORLD)

    assert found.details == (
        "ranks 4-5,7: in all_reduce #2 at train.py:41", "rank 6: data.py:9 in load",
    )  # fmt: skip


def test_the_reason_why_a_rank_is_silent_is_shown() -> None:
    """It may be on another node, or suspended, or hold the interpreter lock."""
    answers = answered({rank: {TP1: calls(*OUT)} for rank in (4, 5)})
    (found,) = find_hung(
        answers, layout(), {6: "x.py:1 in f"}, own=(4, 5, 6), why_silent={6: "is suspended"}
    )

    assert found.summary == (
        "in the tp group {4-7}, ranks 4-5 wait in all_reduce #1, and rank 6 is suspended, and rank"
        " 7 is on another node"
    )
    assert found.details[1:] == (
        "rank 6: is suspended, x.py:1 in f", "rank 7: is on another node",
    )  # fmt: skip


def test_an_answer_survives_its_packet() -> None:
    """With its groups and calls."""
    (answer,) = answered({0: {WORLD: calls("all_reduce:float32[4]", "barrier", done=1)}}).values()

    assert codec.decode(codec.encode(answer)) == answer


@pytest.mark.parametrize(
    ("place", "places", "expected"),
    [
        (
            "f at a.py:1",
            {0: "f at a.py:1", 1: "b.py:2 in g"},
            "rank 1 is not in f: b.py:2 in g",
        ),
        ("f at a.py:1", {1: "g at b.py:2", 2: "finished"}, "ranks 1-2 are not in f"),
        ("f at a.py:1", {0: "f at a.py:9"}, ""),
        ("a.py:1 in g", {0: "b.py:2 in g"}, ""),
    ],
)
def test_who_is_not_in_a_call_that_is_not_recorded(
    place: str, places: dict[int, str], expected: str
) -> None:
    """The place is named if it is the same for all of them."""
    assert describe_elsewhere(place, places) == expected
