"""Reports ranks for which others wait, as long as they do (``--stragglers``).

They are found from the times at which ranks began their collectives. An all_reduce makes all ranks
equally slow, so wall time says nothing. A rank's own time runs from the moment when the last rank
of its group began a call until the rank begins its next call. A rank is late if its own time
exceeds that of its peers in every group it belongs to: stages of a pipeline may differ, but not
their peers in other dims.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, pairwise
from statistics import median

from msgspec import Struct

from meshrun.host.machine import Gpu
from meshrun.host.nvml import Driver, Nvml
from meshrun.host.process_state import Delays, is_stopped, read_delays
from meshrun.host.reactor import Reactor
from meshrun.layout.labels import group_label, rank_name
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.collectives import AskTimes, RankTimes
from meshrun.protocol.events import RankLate, TimesReported
from meshrun.rendezvous.messages import Times

_SHARE = 0.1
_MOST_S, _LEAST_S = 20.0, 0.5
"""Between two requests: each costs a rank 30 ms in another thread (measured), 0.15 % of 20 s."""
_ANSWER_TAKES_S = 2.0
_SM_CLOCK, _CORE_SENSOR = ctypes.c_uint(1), ctypes.c_uint(0)
_MOST_CALLS, _FEWEST_CALLS = 20_000, 20
"""Calls that a node reports to the coordinator: in all, and at least per rank."""
_FEWEST_CHECKS = 3
"""How often a rank is checked, at least, before it is reported as late."""
_LEAST_CALLS = 5
"""The fewest calls that are worth an average."""

Call = tuple[str, int]
"""The name of a group, and the number of a call in it."""


class Stragglers:
    """Asks ranks periodically when they began their calls, and reports which are late.

    Args:
        emit: Called with an event when a rank becomes late, and when it no longer is.
        ask: Asks ranks; their answers are passed to :meth:`receive`.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        reactor: Reactor,
        note: Callable[[str], None],
        emit: Callable[[RankLate], None],
        ask: Callable[[Iterable[int]], None],
    ) -> None:
        self.plan = plan
        """The plan; complete once all nodes have joined."""
        self._driver = Driver(note)
        self._note, self._emit, self._ask_ranks = note, emit, ask
        limit_s = plan.request.straggler_time_s or 0.0
        self._limit_ns = int(limit_s * 1e9)
        self._every_s = min(_MOST_S, max(_LEAST_S, limit_s / _FEWEST_CHECKS))
        self._timer = reactor.call_at(None, self._begin_round, skips=False)
        self._deadline = reactor.call_at(None, self._end_round, skips=False)
        self._answers: dict[int, RankTimes] = {}
        self._expected: frozenset[int] = frozenset()
        """Ranks that were asked."""
        self._unsure_ns = 0
        self.send_to_nodes: Callable[[AskTimes | Times], None] = lambda _: None
        """Sends a message to the other nodes, if there are any."""
        self._asked_ns = self._from_ns = 0
        """Wall-clock time of the last two requests."""
        self.begin()

    def begin(self) -> None:
        """Prepare for a new generation of ranks."""
        self._since: dict[int, int] = {}
        self._reported: set[int] = set()
        self._delays: dict[int, tuple[int, Delays]] = {}
        """For each late rank of this node: since when it is watched, and its delays until then."""
        self._elsewhere: dict[int, str] = {}
        """What delays late ranks of other nodes, as these report it."""
        self._timer.cancel()
        self._deadline.cancel()

    def update(self, state: State) -> None:
        """Take the current state of the launch."""
        self._state = state
        if not state.alive or state.stopping:
            self._timer.cancel()
            self._deadline.cancel()
        elif state.nodes.is_coordinator and not (
            self._timer.is_pending or self._deadline.is_pending
        ):
            self._timer.restart(self._every_s)

    def receive(self, answer: RankTimes) -> None:
        """Take a rank's answer."""
        self._answers[answer.rank] = answer
        if self._deadline.is_pending and self._expected <= self._answers.keys():
            self._deadline.cancel()
            self._end_round()

    def receive_from_node(self, message: AskTimes | TimesReported) -> None:
        """Answer the coordinator; or, as the coordinator, take another node's answer."""
        if isinstance(message, AskTimes):
            state = self._state
            if message.generation == state.generation and not state.nodes.is_coordinator:
                self._watch(message.late)
                self._ask_and_wait(self._state.alive, _ANSWER_TAKES_S)
            return
        self._elsewhere.update(message.why)
        self._unsure_ns = max(self._unsure_ns, message.unsure_ns)
        for answer in message.answers:
            self.receive(answer.shifted(time.time_ns() - time.monotonic_ns()))

    def _begin_round(self) -> None:
        self._from_ns, self._asked_ns = self._asked_ns, time.time_ns()
        self._unsure_ns = 0
        if self._state.nodes.is_alone:
            self._ask_and_wait(self._state.alive, _ANSWER_TAKES_S)
        else:
            self.send_to_nodes(AskTimes(generation=self._state.generation, late=[*self._since]))
            self._ask_and_wait(range(self.plan.layout.world_size), 2 * _ANSWER_TAKES_S)

    def _ask_and_wait(self, ranks: Iterable[int], takes_s: float) -> None:
        self._answers, self._expected = {}, frozenset(ranks)
        self._deadline.restart(takes_s)
        self._ask_ranks(self._state.alive)

    def _end_round(self) -> None:
        if self._state.nodes.is_coordinator:  # or the only node
            self._compare()
            return
        by_ns = time.monotonic_ns() - time.time_ns()
        most = max(_FEWEST_CALLS, _MOST_CALLS // self.plan.layout.world_size)
        answers = [answer.last(most).shifted(by_ns) for answer in self._answers.values()]
        reasons = {rank: self._why(rank) for rank in self._delays}
        self.send_to_nodes(Times(generation=self._state.generation, answers=answers, why=reasons))

    def _compare(self) -> None:
        """Report ranks that have become late, and those that no longer are."""
        now_ns = time.monotonic_ns()
        late = {each.rank: each for each in self._find()}
        self._watch(late)
        for rank in [rank for rank in self._since if rank not in late]:
            del self._since[rank]
            if rank in self._reported:
                self._reported.remove(rank)
                self._note(f"{self._name(rank)} no longer reaches collectives late")
                self._emit(RankLate(rank=rank, group="", share=0.0, per_call_s=0.0, at_ns=now_ns))
        for rank, each in late.items():
            since_ns = self._since.setdefault(rank, now_ns)
            if now_ns - since_ns >= self._limit_ns and rank not in self._reported:
                self._reported.add(rank)
                why = self._why(rank) if rank in self._delays else self._elsewhere.get(rank, "")
                group = group_label(self.plan.layout, each.group, each.description)
                self._note(
                    f"{self._name(rank)} reaches collectives of {group} late: the others wait for"
                    f" it {each.share * 100:.0f} % of the time, {each.per_call_s * 1000:.3g} ms"
                    " each time" + (f" ({why})" if why else "")
                )
                self._emit(
                    RankLate(
                        rank=rank,
                        group=group,
                        share=each.share,
                        per_call_s=each.per_call_s,
                        at_ns=now_ns,
                    )
                )
        self._timer.restart(self._every_s)

    def _find(self) -> Iterator[LateRank]:
        """Yield late ranks: compared on each node by its own clock, and then on all nodes."""
        layout = self.plan.layout
        by_node: dict[int, dict[int, RankTimes]] = {}
        for rank, answer in self._answers.items():
            by_node.setdefault(layout.node_rank(rank), {})[rank] = answer
        for answers in by_node.values():
            yield from find_late(answers, share=_SHARE, since_ns=self._from_ns)
        if len(by_node) > 1:
            yield from find_late(
                self._answers, share=_SHARE, since_ns=self._from_ns, unsure_ns=self._unsure_ns
            )

    def _watch(self, late: Collection[int]) -> None:
        """Watch late ranks of this node from now on; drop what is known about all others."""
        for rank in late:
            if rank not in self._delays and (pid := self._state.alive.get(rank)):
                self._delays[rank] = time.monotonic_ns(), read_delays(pid)
        for rank in self._delays.keys() - {*late}:
            del self._delays[rank]
        for rank in self._elsewhere.keys() - {*late}:
            del self._elsewhere[rank]

    def _why(self, rank: int) -> str:
        """Return what may delay a rank of this node; "" if nothing is found."""
        return ", ".join(self._reasons(rank))

    def _reasons(self, rank: int) -> Iterator[str]:
        began_ns, before = self._delays[rank]
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        if seconds <= 0 or not (pid := self._state.alive.get(rank)):
            return
        spent = read_delays(pid) - before
        shares = (
            (spent.cpu_s, "it used a core"),
            (spent.runnable_s, "it waited for a core"),
            (spent.disk_s, "it waited for a disk"),
            (spent.steal_s, "the hypervisor took a core"),
        )
        for took_s, what in shares:
            if took_s >= _SHARE * seconds:
                yield f"{what} {min(1.0, took_s / seconds) * 100:.0f} % of the time"
        if is_stopped(pid):
            yield "it is suspended"
        if self.plan.device_type == "cuda":
            yield from self._gpu(rank)

    def _gpu(self, rank: int) -> Iterator[str]:
        gpu = self.plan.rank(rank).gpu
        if gpu is None:
            return
        mhz, celsius = self._driver.ask(partial(_clock_and_heat, gpu=gpu)) or (None, None)
        if mhz is not None and celsius is not None:
            yield f"its GPU runs at {mhz} MHz and {celsius} °C"
        elif self._driver.trouble:
            yield self._driver.trouble

    def _name(self, rank: int) -> str:
        layout = self.plan.layout
        is_elsewhere = rank not in self._state.ranks
        return rank_name(layout, rank) + f" on node {layout.node_rank(rank)}" * is_elsewhere


def _clock_and_heat(nvml: Nvml | None, *, gpu: Gpu) -> tuple[int | None, int | None]:
    """Return the clock of a GPU in MHz, and its temperature in °C."""
    found = nvml.whole_gpu(gpu) if nvml is not None else None
    if nvml is None or found is None:
        return None, None
    return (
        nvml.number("nvmlDeviceGetClockInfo", found, _SM_CLOCK),
        nvml.number("nvmlDeviceGetTemperature", found, _CORE_SENSOR),
    )


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
