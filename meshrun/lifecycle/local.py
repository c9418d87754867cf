"""What a launch does next after an event on this node. Pure; time comes in events."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from meshrun.lifecycle.actions import (
    Action,
    Decide,
    EndZygote,
    ReleaseRanks,
    Report,
    StartAll,
    StartZygote,
)
from meshrun.lifecycle.phases import ExitBarrier, Link, NodesPhase, Phase, Stop
from meshrun.lifecycle.restart import back_off, may_continue, may_restart, plan_restart
from meshrun.lifecycle.root_cause import has_root_cause
from meshrun.lifecycle.state import NodesState, State, furthest, has_no_rank_left
from meshrun.protocol.events import (
    Hung,
    LaunchBegan,
    RankLate,
    SignalArrived,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.generation import Cause, RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.zygote_messages import (
    Checked,
    EndGeneration,
    GenerationEnded,
    LeftoversEnded,
    NodeExcluded,
    ProgramBroken,
    RankBeat,
    RankFinished,
    RankJoined,
    RankLeaves,
    RankReady,
    RanksResumed,
    RankStarted,
    SignalRanks,
    StartFailed,
    StoreEnded,
    ZygoteReady,
    ZygoteUnsafe,
)

LEFTOVER_GRACE_S = 2.0
"""How long processes that ranks left behind may take to end after the last rank."""
ZYGOTE_GRACE_S = LEFTOVER_GRACE_S + 5.0
"""How long the zygote may take to answer before it and its ranks are killed."""
SECOND_SIGNAL_GRACE_S = 2.0
_CAUSE_FOLLOWS_NS = 500_000_000
"""How long after a lost connection the rank at its other end may take to raise. On a timeout, gloo
closes its connections one by one before, in up to 10 ms each."""
_IMPATIENT = (signal.SIGINT, signal.SIGPIPE)
"""Signals by which somebody is waiting, or nobody reads the output."""
_OF_ONE_NODE = (signal.SIGTERM, signal.SIGPIPE)
"""Signals that concern one node: its machine is taken away, or its output has lost its reader."""
_NS = 1_000_000_000


def ignore(state: State, _: object) -> State:
    """Return the state as it is, after an event that only matters to watchers of the launch."""
    return state


def _zygote_ready(state: State, _: ZygoteReady) -> State:
    is_first = state.phase is Phase.IMPORTING
    return start_if_due(replace(state, phase=Phase.WAITING) if is_first else state)


def start_if_due(state: State) -> State:
    """Start the ranks if the zygote is ready, every node has joined and no back-off is left."""
    waits = state.begin_ns is not None or state.nodes.phase is NodesPhase.JOINING
    if state.stopping or state.phase is not Phase.WAITING or waits:
        return state
    state = replace(state, phase=Phase.RUNNING).do(StartAll(generation=state.generation))
    # A node without ranks in the mesh has finished at once.
    return state if state.ranks else _release_if_due(state)


def _zygote_unsafe(state: State, _: ZygoteUnsafe) -> State:
    return state if state.stopping else state.do(StartZygote(without_torch=True))


def _raised(state: State, event: RankRaised) -> State:
    waited = _waits_for_threads(state)
    state = _with_rank(state, event.rank, raised=event)
    if _waits_for_threads(state) and not waited:
        state = replace(state, deadline_ns=event.at_ns + int(state.shutdown_timeout_s * _NS))
    return _stop_unless_waiting(state, event)


def _leaves(state: State, event: RankLeaves) -> State:
    state = _with_rank(state, event.rank, left_ns=event.at_ns)
    return state if state.ranks[event.rank].raised is None else _stop_unless_waiting(state, event)


def _stop_unless_waiting(state: State, event: RankRaised | RankLeaves | RankExited) -> State:
    """Stop the ranks once it is known why, and no rank that raised has a thread that needs others.

    Such a thread writes an asynchronous checkpoint, say.
    """
    if _waits_for_threads(state):
        return state
    if _waits_for_cause(state):
        return replace(state, deadline_ns=event.at_ns + _CAUSE_FOLLOWS_NS)
    return stop(state, event.at_ns, sparing=event.rank)


def _waits_for_cause(state: State) -> bool:
    """Return whether ranks have only lost connections, and another may be about to say why."""
    may_follow = any(
        rank_state.pid is not None and rank_state.raised is None and rank_state.exited is None
        for rank_state in state.ranks.values()
    )
    return not state.stopping and may_follow and not has_root_cause(state)


def _waits_for_threads(state: State) -> bool:
    return not state.stopping and any(
        rank_state.raised is not None
        and rank_state.raised.threads
        and rank_state.left_ns is None
        and rank_state.exited is None
        for rank_state in state.ranks.values()
    )


def _start_failed(state: State, event: StartFailed) -> State:
    # Ranks ordered after it may still start; _started() stops them.
    state = replace(state, start_error=state.start_error or event)
    return finish(stop(state, event.at_ns), event.at_ns)


def _store_ended(state: State, event: StoreEnded) -> State:
    is_needed = state.nodes.is_coordinator and not state.signals
    if state.stopping and (not is_needed or has_root_cause(state)):
        return state  # it did not cause the end, and the ranks no longer need it
    state = replace(state, lost_process=event)
    state = state if may_restart(state) else _leave_if_possible(state)
    return finish(stop(state, event.at_ns), event.at_ns)


def _leave_if_possible(state: State) -> State:
    """Leave the launch if the other nodes can continue without this one."""
    if not state.nodes.may_leave:
        return state
    return state.with_nodes(link=Link.CLOSED).do(Report(what="leaves"))


def _hung(state: State, event: Hung) -> State:
    if not state.alive:
        return state  # they exited while the launcher collected their stacks
    if _waits_for_threads(state):
        return stop(state, event.at_ns)
    return stop(replace(state, hung=event), event.at_ns)


def _excluded(state: State, event: NodeExcluded) -> State:
    """Leave the launch if the others can continue without this node; otherwise, end it.

    A rank may have failed already: a restart would use this node again.
    """
    if state.signals or state.excluded is not None or state.over:
        return state
    return stop(_leave_if_possible(replace(state, excluded=event)), event.at_ns)


def _checked(state: State, event: Checked) -> State:
    """End the launch if something is wrong, unless the nodes to blame may be left out."""
    if not event.findings or (event.hosts and not state.nodes.is_alone):
        return state  # ranks of those nodes report NodeExcluded
    return stop(replace(state, failed_check=event), event.at_ns)


def _with_rank(state: State, rank: int, **changes: object) -> State:
    changed = replace(state.ranks[rank], **changes)
    return replace(state, ranks={**state.ranks, rank: changed})


def _started(state: State, event: RankStarted) -> State:
    state = _with_rank(state, event.rank, pid=event.pid)
    # RankRaised comes over another socket, and may arrive before RankStarted.
    ends_by_itself = state.ranks[event.rank].raised is not None and not state.killed
    if not state.stopping or ends_by_itself:
        return state
    signum = signal.SIGKILL if state.killed else signal.SIGTERM
    return _signal_ranks(state, (event.rank,), signum, event.at_ns)


def _beat(state: State, event: RankBeat) -> State:
    step = furthest(state.step, event.step)
    return state if step == state.step else replace(state, step=step)


def _finished(state: State, event: RankFinished) -> State:
    if not state.ranks[event.rank].finished:
        state = _with_rank(state, event.rank, finished_ns=event.at_ns)
    return _release_if_due(state)


def _release_if_due(state: State) -> State:
    """Let finished ranks exit once all have finished, or the ranks are stopping."""
    ranks = state.ranks.values()
    due = state.stopping or all(rank.finished or rank.exited for rank in ranks)
    if state.exit_barrier is ExitBarrier.RELEASED or not due:
        return state
    if not (state.nodes.is_alone or state.stopping):  # ranks of other nodes may need them
        report = [Report(what="finished")] if state.exit_barrier is ExitBarrier.CLOSED else []
        return replace(state, exit_barrier=ExitBarrier.REACHED).do(*report)
    waiting = any(rank.finished and not rank.exited for rank in ranks)
    return (
        replace(state, exit_barrier=ExitBarrier.RELEASED).do(ReleaseRanks()) if waiting else state
    )


def _exited(state: State, event: RankExited) -> State:
    state = _with_rank(state, event.rank, pid=event.pid, exited=event)
    if state.ranks[event.rank].raised is not None:
        state = _stop_unless_waiting(state, event)
    elif event.wait_status != 0:
        state = stop(state, event.at_ns)
    return finish(_release_if_due(state), event.at_ns)


def finish(state: State, at_ns: int) -> State:
    """Once no rank is left, restart the ranks or end the launch."""
    if not has_no_rank_left(state):
        return state
    if state.zygote_gone is not None:  # and everything below it
        return report_cleared(replace(state, phase=Phase.CLEARING))
    nodes = state.nodes
    if nodes.have_joined and state.phase is Phase.IMPORTING:  # the zygote has started nothing yet
        needs_restart = nodes.policy.loss_is_failure
        may_follow = may_restart(state) if needs_restart else may_continue(state)
        may_follow = may_follow and nodes.signum is None
        state = replace(state, deadline_ns=None)
        return report_cleared(state) if may_follow else _kill_zygote(state)
    grace_s = 0.0 if state.killed else LEFTOVER_GRACE_S
    end: Action = EndZygote(grace_s=grace_s)
    if nodes.awaits_decision:
        end = EndGeneration(grace_s=grace_s)
    elif nodes.is_alone and state.stopping:
        state, cause = plan_restart(state, at_ns)
        if cause is not None:
            state, end = with_cause(state, cause), EndGeneration(grace_s=grace_s)
    phase = Phase.ENDING if isinstance(end, EndZygote) else Phase.CLEARING
    deadline_ns = at_ns + int(ZYGOTE_GRACE_S * _NS)
    return replace(state, phase=phase, deadline_ns=deadline_ns).do(end)


def with_cause(state: State, cause: Cause) -> State:
    """Return the state with the reason for which this generation ended and another follows."""
    return replace(state, causes=(*state.causes, cause))


def _generation_ended(state: State, event: GenerationEnded | ZygoteGone) -> State:
    """Start the next generation; on several nodes, report to the coordinator, which decides."""
    if state.phase is not Phase.CLEARING:
        return state
    if state.nodes.is_alone:
        return start_next_generation(state, event.at_ns)
    if not state.nodes.awaits_decision:  # the coordinator has been lost
        return end_zygote(state, event.at_ns)
    return report_cleared(replace(state, deadline_ns=None))


def start_next_generation(state: State, at_ns: int) -> State:
    """Start the ranks of the next generation, after a back-off if they make no progress.

    Only the zygote stays; if it is gone, another one replaces it.
    """
    nodes, (wait_s, _) = state.nodes, back_off(state.causes)
    is_importing = state.zygote_gone is not None or state.phase is Phase.IMPORTING
    if nodes.have_joined:
        nodes = NodesState(
            phase=NodesPhase.RUNNING,
            is_coordinator=nodes.is_coordinator,
            policy=nodes.policy,
            failed=nodes.failed,
        )
    fresh = State(
        shutdown_timeout_s=state.shutdown_timeout_s,
        ranks={rank: RankState() for rank in state.ranks},
        max_restarts=state.max_restarts,
        causes=state.causes,
        sigterm_repeats=state.sigterm_repeats,
        signals=state.signals,
        why_signalled=state.why_signalled,
        phase=Phase.IMPORTING if is_importing else Phase.WAITING,
        begin_ns=at_ns + int(wait_s * _NS) if wait_s else None,
        nodes=nodes,
        actions=state.actions,
    )
    # Signals may have arrived after the last rank had exited, and the nodes may not fit here.
    if fresh.signals or nodes.failed is not None:
        fresh = replace(fresh, zygote_gone=state.zygote_gone)
        return finish(stop(fresh, at_ns), at_ns)
    if state.zygote_gone is not None:
        fresh = fresh.do(StartZygote())
    return start_if_due(fresh)


def stop(
    state: State,
    at_ns: int,
    *,
    sparing: int | None = None,
    signum: int = signal.SIGTERM,
    others_know: bool = False,
) -> State:
    """Ask the ranks to stop, once, and set their deadline.

    The rank ``sparing`` is ending by itself. If ``others_know``, the coordinator is not notified.
    """
    if state.stopping:
        return state
    state = replace(state, stop=Stop.ASKED)
    if state.nodes.is_cleared and others_know:
        return state  # no rank is left here
    if state.phase not in (Phase.CLEARING, Phase.ENDING):  # there, it is the zygote's
        state = replace(state, deadline_ns=at_ns + int(state.shutdown_timeout_s * _NS))
    ranks = tuple(sorted(state.alive.keys() - {sparing}))
    state = _release_if_due(_signal_ranks(state, ranks, signum, at_ns))
    is_news = state.nodes.awaits_decision and not others_know
    return state.do(Report(what="failed")) if is_news else state


def _signal_ranks(state: State, ranks: tuple[int, ...], signum: int, at_ns: int) -> State:
    for rank in ranks:
        if state.ranks[rank].asked_to_end_ns is None:
            state = _with_rank(state, rank, asked_to_end_ns=at_ns)
    order = SignalRanks(ranks=ranks, signum=signum)
    return state.do(order) if ranks else state


def _kill(state: State, at_ns: int) -> State:
    deadline_ns = at_ns + int(ZYGOTE_GRACE_S * _NS)
    state = replace(state, stop=Stop.KILLED, deadline_ns=deadline_ns)
    return _signal_ranks(state, tuple(sorted(state.alive)), signal.SIGKILL, at_ns)


def _zygote_gone(state: State, event: ZygoteGone) -> State:
    """End this generation, as nothing is left of it, unless it was ending already.

    If another zygote is not started, ``advance`` ends the launch once nothing is to be decided.
    """
    nodes = state.nodes
    state = replace(state, zygote_gone=event)
    if state.over or (nodes.have_joined and not nodes.awaits_decision):
        return state
    was_ending = state.phase is Phase.ENDING or state.broken is not None
    if (state.phase is Phase.CLEARING or nodes.is_cleared) and not was_ending:
        is_last = nodes.is_alone and bool(state.signals)
        return state if is_last else _generation_ended(replace(state, phase=Phase.CLEARING), event)
    is_failure = state.signals or state.start_error or state.hung or has_root_cause(state)
    if not (was_ending or is_failure or state.lost_process):
        state = replace(state, lost_process=event)
    if nodes.have_joined:
        return _zygote_gone_on_one_node(state, event)
    state, cause = (state, None) if was_ending else plan_restart(state, event.at_ns)
    if cause is None:
        return state
    return start_next_generation(with_cause(state, cause), event.at_ns)


def _zygote_gone_on_one_node(state: State, event: ZygoteGone) -> State:
    """Leave the launch, or report that nothing is left here: the coordinator decides what next."""
    nodes = state.nodes
    if not nodes.policy.needs_all and (nodes.is_cleared or nodes.link is Link.RETURNING):
        return leave(mark_stopped(state), event.at_ns)
    if state.lost_process is event and nodes.may_leave and not may_restart(state):
        return _leave_if_possible(mark_stopped(state))
    if not state.stopping:
        state = state.do(Report(what="failed"))
    phase = Phase.ENDING if state.phase is Phase.ENDING else Phase.CLEARING
    return report_cleared(mark_stopped(state, phase=phase, deadline_ns=None))


def _signalled(state: State, event: SignalArrived) -> State:
    """Stop all nodes, or only this one if the signal concerns it alone and others can continue."""
    is_sigterm, before = event.signum == signal.SIGTERM, state.signals
    if len(before) > 2 or (is_sigterm and state.sigterm_repeats and signal.SIGTERM in before):
        return state  # after the third signal all ranks are killed, and the deadline stays
    if state.over or state.nodes.phase is NodesPhase.OVER:  # only notifying the other nodes is left
        return replace(state, signals=(*before, event.signum))
    if event.signum in _OF_ONE_NODE and not before:
        state = _leave_if_possible(state)
    stopped = _stop_for_signal(state, event)
    return _end_if_unstarted(stopped, event.at_ns, was_stopping=state.stopping)


def _stop_for_signal(state: State, event: SignalArrived) -> State:
    """Ask the ranks to stop at the first signal; kill them soon after the second, now at the third.

    ``_time_passed`` kills them once the time after the second is over.
    """
    is_first, was_stopping = not state.signals, state.stopping
    why = event.why if is_first else state.why_signalled
    state = replace(state, signals=(*state.signals, event.signum), why_signalled=why)
    if is_first and not was_stopping:
        # Ranks would ignore SIGPIPE, as Python does by default.
        signum = signal.SIGTERM if event.signum == signal.SIGPIPE else event.signum
        return stop(state, event.at_ns, signum=signum)
    if is_first and not _counts_as_second(state, event.signum):
        return state
    if len(state.signals) > 2:
        return _kill(state.with_nodes(link=Link.CLOSED), event.at_ns)  # wait for no decision
    grace_ns = int(min(SECOND_SIGNAL_GRACE_S, state.shutdown_timeout_s) * _NS)
    deadline_ns = min(event.at_ns + grace_ns, state.deadline_ns or event.at_ns + grace_ns)
    return replace(state, deadline_ns=deadline_ns)


def _counts_as_second(state: State, signum: int) -> bool:
    """Return whether a first signal that finds the ranks already stopping counts as the second.

    SIGINT and SIGPIPE do: somebody is waiting, or nobody reads the output. Other signals do not, as
    schedulers send them to all launchers, and another node may have received its own first.
    """
    return signum in _IMPATIENT and state.nodes.signum != signum


def _end_if_unstarted(state: State, at_ns: int, *, was_stopping: bool) -> State:
    """End at a signal if no rank has started, or is left, as there is nothing to wait for."""
    nodes = state.nodes
    if nodes.is_cleared and nodes.awaits_decision:
        if nodes.may_end_alone and was_stopping:
            return leave(state, at_ns)
        return state  # the coordinator stops the others, and decides once they are cleared
    if state.alive or state.phase in (Phase.ENDING, Phase.OVER):
        return state
    return _kill_zygote(state)


def _kill_zygote(state: State) -> State:
    return replace(state, phase=Phase.ENDING, deadline_ns=None).do(EndZygote(by_force=True))


def _time_passed(state: State, event: TimePassed) -> State:
    at_ns = event.at_ns
    if state.begin_ns is not None and at_ns >= state.begin_ns and not state.stopping:
        return start_if_due(replace(state, begin_ns=None))
    if state.deadline_ns is None or at_ns < state.deadline_ns or state.over:
        return state
    is_ending = state.phase in (Phase.CLEARING, Phase.ENDING)
    if not (state.stopping or is_ending):  # the threads or the cause took too long
        return stop(state, at_ns)
    if state.killed or is_ending:
        # SIGKILL did not suffice, or the zygote does not answer: kill it, and so its ranks.
        state = replace(state, deadline_ns=None)
        if state.phase is Phase.CLEARING and state.nodes.is_alone:  # cancel the restart
            why = "processes left behind by the ranks could not be cleaned up"
            causes = state.causes[:-1]
            state = replace(state, phase=Phase.ENDING, causes=causes, no_restart=why)
        # With a coordinator, the others may restart, and another zygote starts here.
        return state.do(EndZygote(by_force=True))
    return _kill(state, at_ns)


# ---- the end of this node's part -----------------------------------------------------------


def end_zygote(state: State, at_ns: int) -> State:
    """End the zygote, as no rank is left and none will be started."""
    if state.zygote_gone is not None or state.phase is Phase.ENDING:
        return state
    if state.phase is Phase.IMPORTING:
        return _kill_zygote(state)  # it would obey only once it has imported torch
    deadline_ns = at_ns + int(ZYGOTE_GRACE_S * _NS)
    return replace(state, phase=Phase.ENDING, deadline_ns=deadline_ns).do(EndZygote())


def leave(state: State, at_ns: int) -> State:
    """End this node's part; on the coordinator, end the launch if it waits for more nodes."""
    if not state.nodes.is_coordinator:
        return end_zygote(state.with_nodes(link=Link.CLOSED), at_ns)
    is_awaited = state.nodes.phase is NodesPhase.AWAITING_NODES
    return state.do(Decide(next_after=None)) if is_awaited else state


def mark_stopped(state: State, **changes: Any) -> State:
    """Return the state with its ranks marked as asked to stop, unless they have been killed."""
    stop = state.stop if state.stopping else Stop.ASKED
    return replace(state, stop=stop, **changes)


def report_cleared(state: State) -> State:
    """Report to the coordinator, once, that nothing of this generation is left here."""
    if state.nodes.is_cleared or not state.nodes.awaits_decision:
        return state
    return state.with_nodes(phase=NodesPhase.CLEARED).do(Report(what="cleared"))


HANDLERS: dict[type[Any], Callable[[State, Any], State]] = {
    LaunchBegan: ignore,
    ZygoteReady: _zygote_ready,
    ZygoteUnsafe: _zygote_unsafe,
    ProgramBroken: lambda state, event: replace(state, broken=event),
    RankStarted: _started,
    StartFailed: _start_failed,
    RankJoined: lambda state, event: _with_rank(state, event.rank, joined=True),
    RankReady: lambda state, event: _with_rank(
        state, event.rank, joined=True, ready_ns=event.at_ns
    ),
    RankRaised: _raised,
    RankBeat: _beat,
    RankFinished: _finished,
    RankLeaves: _leaves,
    RankExited: _exited,
    RanksResumed: ignore,
    StoreEnded: _store_ended,
    LeftoversEnded: ignore,
    GenerationEnded: _generation_ended,
    ZygoteGone: _zygote_gone,
    SignalArrived: _signalled,
    Hung: _hung,
    NodeExcluded: _excluded,
    Checked: _checked,
    RankLate: ignore,
    TimePassed: _time_passed,
}
