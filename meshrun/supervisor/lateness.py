"""Finds ranks that reach collectives late, from the times at which ranks began them. Pure.

An all_reduce makes all ranks equally slow, so wall time says nothing. A rank's own time runs from
the moment when the last rank of its group began a call until the rank begins its next call. A rank
is late if its own time exceeds that of its peers in every group it belongs to: stages of a pipeline
may differ, but not their peers in other dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, pairwise
from statistics import median

from msgspec import Struct

from meshrun.protocol.collectives import RankTimes

_LEAST_CALLS = 5
"""The fewest calls that are worth an average."""

Call = tuple[str, int]
"""The name of a group, and the number of a call in it."""


class LateRank(Struct, frozen=True):
    """A rank that others wait for."""

    rank: int
    share: float
    """The share of the time by which it takes longer than its peers."""
    per_call_s: float
    """The mean delay of one call."""
    group: tuple[int, ...]
    """The ranks of the group in whose calls it is late."""
    description: str
    """torch's description of that group."""


def find_late(
    answers: Mapping[int, RankTimes], *, share: float, since_ns: int = 0, unsure_ns: int = 0
) -> list[LateRank]:
    """Return the ranks that take longer than their peers by at least a share of the time.

    Args:
        answers: The times of each rank's calls.
        share: From 0 to 1.
        since_ns: The wall-clock time before which calls do not count.
        unsure_ns: The error of the difference between the nodes' clocks.
    """
    members = {each.name: each for answer in answers.values() for each in answer.groups}
    calls_of = {
        rank: [
            (at_ns, (answer.groups[group].name, number))
            for group, number, at_ns in answer.calls
            if at_ns >= since_ns
        ]
        for rank, answer in answers.items()
    }
    work, elapsed_ns = _own_times(calls_of)
    totals = {rank: sum(own.total_ns for own in groups.values()) for rank, groups in work.items()}
    found = []
    for rank, groups in work.items():
        peers_by_group = (
            [totals[peer] for peer in group.ranks if peer != rank and peer in totals]
            for group in members.values()
            if rank in group.ranks
        )
        excess = (totals[rank] - median(peers) for peers in peers_by_group if peers)
        late_ns, calls = min(excess, default=0.0), sum(own.calls for own in groups.values())
        if elapsed_ns and late_ns >= share * elapsed_ns + unsure_ns * calls:
            name, own = max(groups.items(), key=lambda item: item[1].total_ns)
            group, per_call_s = members[name], late_ns / own.calls / 1e9
            ranks = tuple(group.ranks)
            found.append(LateRank(rank, late_ns / elapsed_ns, per_call_s, ranks, group.description))
    return sorted(found, key=lambda late: -late.share)


class _OwnTime(Struct):
    """A rank's own time before its calls in one group."""

    total_ns: int = 0
    calls: int = 0


def _own_times(
    calls_of: Mapping[int, list[tuple[int, Call]]],
) -> tuple[dict[int, dict[str, _OwnTime]], int]:
    """Return each rank's own time by group, in the period that all ranks cover, and its length."""
    last: dict[Call, int] = {}
    for at_ns, call in chain.from_iterable(calls_of.values()):
        last[call] = max(at_ns, last.get(call, at_ns))
    ordered = {rank: sorted(calls) for rank, calls in calls_of.items() if len(calls) > _LEAST_CALLS}
    if len(ordered) < 2:
        return {}, 0
    first_ns = max(calls[0][0] for calls in ordered.values())
    until_ns = min(calls[-1][0] for calls in ordered.values())
    work = {}
    for rank, calls in ordered.items():
        groups: dict[str, _OwnTime] = {}
        for (_, before), (at_ns, call) in pairwise(calls):
            if first_ns <= at_ns <= until_ns:
                own = groups.setdefault(call[0], _OwnTime())
                own.total_ns += max(0, at_ns - last[before])
                own.calls += 1
        if sum(own.calls for own in groups.values()) < _LEAST_CALLS:
            return {}, 0
        work[rank] = groups
    return work, until_ns - first_ns
