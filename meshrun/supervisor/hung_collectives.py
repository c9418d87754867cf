"""Finds which ranks wait in which collective, for whom, and why, from their calls. Pure.

All ranks of a group call its collectives in the same order, so their n-th calls belong together.
If these differ, the program is wrong; if a rank has not made a call that others wait in, they wait
for that rank.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from meshrun.layout import Layout
from meshrun.layout.labels import group_label
from meshrun.protocol.collectives import Call, GroupCalls, RankCalled
from meshrun.wording import number_ranges

_SAME_INPUTS = frozenset({
    "all_reduce", "allreduce", "broadcast", "reduce", "all_gather_into_tensor", "gather",
    "reduce_scatter_tensor",
})  # fmt: skip
"""Collectives whose inputs have the same shape on each rank."""
_SAME_OUTPUTS = frozenset({"all_gather", "scatter", "reduce_scatter"})
"""Collectives whose outputs have the same shape on each rank."""
_ELSEWHERE = "is on another node"
_KIB = 1024


class HungGroup(Struct, frozen=True):
    """Why one group hangs."""

    severity: int
    """0 if the calls contradict each other, 1 if ranks are missing, 2 if these wait in another
    group."""
    summary: str
    """One line."""
    details: tuple[str, ...]
    """One line for each set of ranks at the same call."""


def find_hung(
    answers: Mapping[int, RankCalled],
    layout: Layout,
    places: Mapping[int, str],
    *,
    own: Container[int],
    why_silent: Mapping[int, str] = MappingProxyType({}),
) -> list[HungGroup]:
    """Return what holds up each group in which a rank waits, the causes first.

    Args:
        answers: The calls of each rank that answered.
        layout: The layout, which names the dims.
        places: Where in the program each rank is, such as ``all_reduce at train.py:41``.
        own: The ranks of this node.
        why_silent: Why ranks gave no answer, such as ``is suspended``.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupCalls]] = {}
    for rank, answer in answers.items():
        for group in answer.groups:
            groups.setdefault((group.name, tuple(group.ranks)), {})[rank] = group
    waiting = {
        rank: (_name(layout, group), call)
        for rank, answer in answers.items()
        for group in answer.groups
        if (call := _under_way(group)) is not None
    }
    findings = []
    for (_, ranks), members in groups.items():
        if any(map(_under_way, members.values())):
            name = _name(layout, next(iter(members.values())))
            silent = {
                rank: why_silent.get(rank, "does not answer") if rank in own else _ELSEWHERE
                for rank in ranks
                if rank not in members
            }
            findings.append(_examine(name, members, silent, waiting, places))
    return sorted(findings, key=lambda finding: finding.severity)


def describe_peers(answers: Mapping[int, RankCalled], layout: Layout, rank: int, place: str) -> str:
    """Return the last call of a peer that most likely matches a rank's call; "" if unknown.

    The rank has not answered, and was at ``place``, such as ``all_reduce at train.py:41``.
    """
    function = place.partition(" at ")[0]
    found = [
        ((call.op not in function, call.is_done, len(group.ranks), peer), call, group)
        for peer, answer in sorted(answers.items())
        for group in answer.groups
        if peer != rank and rank in group.ranks
        for call in group.calls[-1:]
    ]
    if not found:
        return ""
    (*_, peer), call, group = min(found, key=lambda each: each[0])
    return f"rank {peer} called {_named(call)}{_size(call)} of {_name(layout, group)}"


def describe_elsewhere(place: str, places: Mapping[int, str]) -> str:
    """Return which ranks are not in a call that torch does not record; "" if all are in it.

    The call is that of ``place``, such as ``monitored_barrier at train.py:41``.
    """
    function, is_call, _ = place.partition(" at ")
    elsewhere = {
        rank: found for rank, found in places.items() if found.partition(" at ")[0] != function
    }
    if not (is_call and elsewhere):
        return ""
    text = f"{_ranks(elsewhere)} {_agree(list(elsewhere), 'is')} not in {function}"
    where = set(elsewhere.values())
    return f"{text}: {where.pop()}" if len(where) == 1 else text


def _examine(
    name: str,
    members: Mapping[int, GroupCalls],
    silent: Mapping[int, str],
    waiting: Mapping[int, tuple[str, Call]],
    places: Mapping[int, str],
) -> HungGroup:
    """Return why a group hangs, of whose ranks ``members`` have answered, and ``silent`` not."""
    if (found := _contradiction(members)) is not None:
        text, number = found
        calls = {rank: call for rank, group in members.items() for call in _numbered(group, number)}
        return HungGroup(0, f"in {name}, {text}", tuple(_at_calls(calls, places)))
    under_way = {
        rank: call for rank, group in members.items() if (call := _under_way(group)) is not None
    }
    latest = max(under_way.values(), key=lambda call: call.number)
    absent = [
        rank
        for rank, group in members.items()
        if rank not in under_way and (not group.calls or group.calls[-1].number < latest.number)
    ]
    why_silent = _sets_by_size(silent)
    is_elsewhere = any(rank in waiting for rank in absent)
    return HungGroup(
        2 if is_elsewhere else 1,
        f"in {name}, {_describe_wait(latest, under_way, absent, why_silent)}",
        (
            *_at_calls(under_way, places),
            *_absent(absent, waiting, places),
            *_silent(why_silent, places),
        ),
    )


def _describe_wait(
    latest: Call,
    under_way: Mapping[int, Call],
    absent: Sequence[int],
    silent: Mapping[str, Sequence[int]],
) -> str:
    """Return which ranks wait in a group's latest call, and for whom."""
    behind = [rank for rank, call in under_way.items() if call.number < latest.number]
    in_it = [rank for rank in under_way if rank not in behind]
    wait = f"{_ranks(in_it)} {_agree(in_it, 'waits')} in {_named(latest)}"
    if late := sorted([*absent, *behind]):
        return f"{wait}, which {_ranks(late)} {_agree(late, 'has')} not called"
    if silent:
        missing = [f"{_ranks(those)} {_agree(those, why)}" for why, those in silent.items()]
        return f"{wait}, and {', and '.join(missing)}"
    return f"every rank is in {_named(latest)}, which has not completed"


def _silent(silent: Mapping[str, Sequence[int]], places: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each reason for which ranks have not answered."""
    for why, those in silent.items():
        where = sorted({places[rank] for rank in those if rank in places})
        at = f", {where[0]}" if where else ""
        yield f"{_ranks(those)}: {_agree(those, why)}{at}"


def _at_calls(calls: Mapping[int, Call], places: Mapping[int, str]) -> list[str]:
    """Return a line for each set of ranks at the same call."""
    return _lines({
        rank: f"in {_named(call)}{_size(call)}{_at(places.get(rank, ''))}"
        for rank, call in calls.items()
    })  # fmt: skip


def _absent(
    absent: Iterable[int], waiting: Mapping[int, tuple[str, Call]], places: Mapping[int, str]
) -> list[str]:
    """Return a line for each set of ranks that are elsewhere."""
    texts = {rank: places.get(rank) or "at an unknown call" for rank in absent}
    for rank in texts.keys() & waiting.keys():
        group, call = waiting[rank]
        texts[rank] = f"in {_named(call)} of {group}{_at(places.get(rank, ''))}"
    return _lines(texts)


def _lines(texts: Mapping[int, str]) -> list[str]:
    """Return a line for each set of ranks with the same text."""
    return [f"{_ranks(those)}: {text}" for text, those in _sets(texts).items()]


def _contradiction(members: Mapping[int, GroupCalls]) -> tuple[str, int] | None:
    """Return how the ranks' calls differ, and the number of the first calls that do."""
    by_number: dict[int, dict[int, Call]] = {}
    for rank, group in members.items():
        for call in group.calls:
            by_number.setdefault(call.number, {})[rank] = call
    for number in sorted(by_number):
        calls = by_number[number]
        ops = _sets_by_size({rank: call.op for rank, call in calls.items()})
        if len(ops) > 1:
            how = "different collectives"
            if _is_reordered(members, number):
                how = "the same collectives in a different order"
            return f"the ranks call {how}: #{number} is {_list(ops)}", number
        shapes = _sets_by_size({rank: _compared(call) for rank, call in calls.items()})
        if len(shapes) > 1:
            what = f"{next(iter(ops))} #{number} with different shapes or types"
            return f"the ranks call {what}: {_list(shapes)}", number
    return None


def _is_reordered(members: Mapping[int, GroupCalls], number: int) -> bool:
    """Return whether each rank makes the other ranks' calls too, earlier or later."""
    now = {rank: call.op for rank, group in members.items() for call in _numbered(group, number)}
    near = {
        rank: {call.op for call in group.calls if call.number != number}
        for rank, group in members.items()
        if rank in now
    }
    others = set(now.values())
    return all(others - {op} <= near[rank] for rank, op in now.items())


def _numbered(group: GroupCalls, number: int) -> list[Call]:
    return [call for call in group.calls if call.number == number]


def _compared(call: Call) -> str:
    """Return the part of a call that must be the same on all ranks."""
    if call.op in _SAME_INPUTS:
        return call.inputs
    return call.outputs if call.op in _SAME_OUTPUTS else ""


def _under_way(group: GroupCalls) -> Call | None:
    return next((call for call in group.calls if not call.is_done), None)


def _sets(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks with each value, the value of the first rank first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found


def _sets_by_size(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks with each value, the most common value first."""
    return dict(sorted(_sets(values).items(), key=lambda item: -len(item[1])))


def _list(sets: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in sets.items())


def _named(call: Call) -> str:
    return f"{call.op} #{call.number}"


def _size(call: Call) -> str:
    if not call.n_bytes:
        return ""
    size, unit = float(call.n_bytes), "B"
    for larger in ("KB", "MB", "GB"):
        if size < _KIB:
            break
        size, unit = size / _KIB, larger
    what = call.inputs or call.outputs
    return f" ({what}, {size:.3g} {unit})" if what else ""


def _ranks(ranks: Iterable[int]) -> str:
    text = number_ranges(ranks)
    return f"rank{'' if text.isdecimal() else 's'} {text}"


def _agree(ranks: Sequence[int], predicate: str) -> str:
    """Return a predicate such as ``is suspended`` in the number of its subject, these ranks."""
    verb, space, rest = predicate.partition(" ")
    plurals = {"is": "are", "has": "have", "does": "do", "waits": "wait"}
    return predicate if len(ranks) == 1 else f"{plurals.get(verb, verb)}{space}{rest}"


def _at(headline: str) -> str:
    """Return `` at train.py:41`` of ``all_reduce at train.py:41``; "" of ""."""
    place = headline.rpartition(" at ")[2].partition(" in ")[0]
    return f" at {place}" if place else ""


def _name(layout: Layout, group: GroupCalls) -> str:
    return group_label(layout, group.ranks, group.description)
