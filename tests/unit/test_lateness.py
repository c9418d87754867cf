"""Which rank reaches collectives late, from the times at which ranks began their calls."""

from __future__ import annotations

import random

import pytest

from meshrun.protocol.collectives import GroupCalls, RankTimes
from meshrun.supervisor.stragglers import find_late

MS = 1_000_000
TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def train(
    *, slow: int | None = None, by_ms: float = 0.0, before: str = "tp", steps: int = 200,
    noise_ms: float = 0.0, stages: tuple[float, float] = (10, 10), world: bool = False,
) -> dict[int, RankTimes]:  # fmt: skip
    """Simulate training on dp=2,tp=2: compute and a call, in tp, in dp, and with ``world`` in all.

    ``stages`` are the milliseconds that the ranks of each dp index compute, as in a pipeline.
    """
    dice = random.Random(4)
    now = dict.fromkeys(range(4), 0.0)
    calls: dict[int, list[list[int]]] = {rank: [] for rank in range(4)}
    for step in range(1, steps + 1):
        for index, (dim, groups) in enumerate((("tp", TP), ("dp", DP), ("all", ((0, 1, 2, 3),)))):
            if dim == "all" and not world:
                continue
            for group in groups:
                for rank in group:
                    now[rank] += stages[rank // 2] + dice.random() * noise_ms
                    now[rank] += by_ms if rank == slow and dim == before else 0.0
                    calls[rank].append([index, step, int(now[rank] * MS)])
                end = max(now[rank] for rank in group) + 0.1
                now.update(dict.fromkeys(group, end))
    times = {}
    for rank in range(4):
        members = [next(g for g in groups if rank in g) for groups in (TP, DP)]
        groups = [
            GroupCalls(name=str(ranks), description=f"mesh_{dim}", ranks=list(ranks), calls=[])
            for dim, ranks in (*zip(("tp", "dp"), members, strict=True), ("all", (0, 1, 2, 3)))
        ]
        times[rank] = RankTimes(rank=rank, at_ns=0, groups=groups[: 3 if world else 2],
                                calls=calls[rank])  # fmt: skip
    return times


def test_uncertain_clocks_blame_no_rank() -> None:
    """5 ms over two calls, in tp and dp, are 2.5 ms each: more than 2 ms, less than 3 ms."""
    times = train(slow=3, by_ms=5)
    assert [late.rank for late in find_late(times, share=0.01, unsure_ns=2 * MS)] == [3]
    assert find_late(times, share=0.01, unsure_ns=3 * MS) == []


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("dim", ["tp", "dp"])
def test_the_slow_rank_is_named_and_no_other(slow: int, dim: str) -> None:
    """Ranks that are late only because they waited for it in another group are not named."""
    (late,) = find_late(train(slow=slow, by_ms=5, before=dim, noise_ms=2), share=0.1)

    assert late.rank == slow
    assert late.description == f"mesh_{dim}"
    assert late.group == next(g for g in (TP if dim == "tp" else DP) if slow in g)
    assert late.per_call_s == pytest.approx(0.005, rel=0.1)
    assert late.share == pytest.approx(5 / 26, rel=0.2)


def test_noise_makes_no_rank_late() -> None:
    """However large, if all ranks have it."""
    assert find_late(train(noise_ms=30), share=0.1) == []


def test_a_little_later_is_not_late() -> None:
    assert find_late(train(slow=1, by_ms=1, noise_ms=2), share=0.1) == []


def test_stages_may_differ() -> None:
    """A pipeline stage with more work is not late: its peers in tp are as slow."""
    assert find_late(train(stages=(10, 20), world=True), share=0.1) == []


def test_earlier_calls_do_not_count() -> None:
    times = train(slow=1, by_ms=5)
    until = max(at for _, _, at in times[0].calls)

    assert find_late(times, share=0.1, since_ns=until + 1) == []


def test_too_few_calls_prove_nothing() -> None:
    assert find_late({}, share=0.1) == []
    assert find_late(train(slow=1, by_ms=5, steps=2), share=0.1) == []
