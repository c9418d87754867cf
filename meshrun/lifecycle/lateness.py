"""Which rank is late at collectives, from when each rank began its calls. Pure.

An all_reduce makes all ranks equally slow, so wall time does not tell. What a rank does by itself
is the time from when the last rank of its group began one call, until it begins its own next call.
A rank is late if it takes longer for that than its peers do, in every group that it is part of:
stages of a pipeline may differ, but their peers of other dims do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from meshrun.protocol.collectives import RankTimes

_LEAST_CALLS = 5
"""Fewer say nothing."""

Call = tuple[str, int]
"""A group and the number of a call in it."""


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that others wait for."""

    rank: int
    share: float
    """Of the time, that it takes longer than its peers."""
    per_call_s: float
    """The same for one call of a collective, on average."""
    group: tuple[int, ...]
    """The ranks of the group in whose calls it is late."""
    description: str
    """torch's, of that group."""


def find_late(
    told: Mapping[int, RankTimes], *, share: float, since_ns: int = 0, unsure_ns: int = 0
) -> list[Late]:
    """Return the ranks that spend at least this share of the time on what peers do not.

    Args:
        told: What ranks have answered.
        share: From 0 to 1.
        since_ns: Calls that began before this wall-clock time do not count.
        unsure_ns: By how much the clocks of their nodes may be misjudged.
    """
    began: dict[Call, dict[int, int]] = {}
    own: dict[int, list[tuple[int, Call]]] = {}
    members: dict[str, tuple[tuple[int, ...], str]] = {}
    for rank, answer in told.items():
        for named in answer.groups:
            members[named.name] = tuple(named.ranks), named.description
        for group, number, at_ns in answer.calls:
            if at_ns < since_ns:
                continue
            call = answer.groups[group].name, number
            began.setdefault(call, {})[rank] = at_ns
            own.setdefault(rank, []).append((at_ns, call))
    last = {call: max(times.values()) for call, times in began.items()}
    work, elapsed_ns = _work(own, last)
    totals = {rank: sum(spent.total_ns for spent in of.values()) for rank, of in work.items()}
    found = []
    for rank, total_ns in totals.items():
        peers_of = {
            name: peers
            for name, (ranks, _) in members.items()
            if rank in ranks and (peers := [r for r in ranks if r != rank and r in work])
        }
        excess = (total_ns - median(totals[peer] for peer in peers) for peers in peers_of.values())
        late_ns = min(excess, default=0.0)
        calls = sum(of.calls for of in work[rank].values())
        if not elapsed_ns or late_ns < share * elapsed_ns + unsure_ns * calls:
            continue
        name = max(work[rank], key=lambda name: work[rank][name].total_ns)
        per_call_s = late_ns / work[rank][name].calls / 1e9
        found.append(Late(rank, late_ns / elapsed_ns, per_call_s, *members[name]))
    return sorted(found, key=lambda late: -late.share)


@dataclass(slots=True)
class _Spent:
    """What a rank did by itself before its calls in one group."""

    total_ns: int = 0
    calls: int = 0


def _work(
    own: Mapping[int, list[tuple[int, Call]]], last: Mapping[Call, int]
) -> tuple[dict[int, dict[str, _Spent]], int]:
    """Return what each rank did in the time of which all tell, by group, and how long that is."""
    ordered = {rank: sorted(calls) for rank, calls in own.items() if len(calls) > _LEAST_CALLS}
    if len(ordered) < 2:
        return {}, 0
    first_ns = max(calls[0][0] for calls in ordered.values())
    until_ns = min(calls[-1][0] for calls in ordered.values())
    work = {}
    for rank, calls in ordered.items():
        spent: dict[str, _Spent] = {}
        for (_, before), (at_ns, call) in pairwise(calls):
            if first_ns <= at_ns <= until_ns:
                of = spent.setdefault(call[0], _Spent())
                of.total_ns += max(0, at_ns - last[before])
                of.calls += 1
        if sum(of.calls for of in spent.values()) < _LEAST_CALLS:
            return {}, 0
        work[rank] = spent
    return work, until_ns - first_ns
