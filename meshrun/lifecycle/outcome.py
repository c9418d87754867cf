"""The last state of a launch -> its result and exit code; ``root_cause`` chooses the cause. Pure.

On several nodes, each reports a :class:`NodeOutcome` to the coordinator first.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshrun.errors import (
    PREEMPTED,
    CheckError,
    HangError,
    HostError,
    InternalError,
    MeshrunError,
    NodeExcludedError,
    NodeLostError,
    exit_code_of,
)
from meshrun.layout import Layout
from meshrun.layout.labels import rank_label, rank_name
from meshrun.lifecycle.root_cause import (
    FailedRank,
    describe_failed_rank,
    describe_failure,
    describe_lost_process,
    describe_start_error,
    failed_ranks,
    has_root_cause,
)
from meshrun.lifecycle.state import State
from meshrun.protocol.events import NodeLost
from meshrun.protocol.generation import Ending, Evidence, NodeOutcome, Trouble
from meshrun.protocol.result import (
    LaunchResult,
    RankFailure,
    Timings,
    signal_name,
    split_wait_status,
)
from meshrun.protocol.stacks import current_folder, user_place
from meshrun.protocol.zygote_messages import StoreEnded

_NOTHING = Evidence()


def node_outcome(
    state: State,
    layout: Layout,
    hosts: Sequence[str],
    host: str,
    evidence: Mapping[int, Evidence] = MappingProxyType({}),
) -> NodeOutcome:
    """Return what this node reports to the coordinator after a generation.

    The first arguments are those of :func:`describe_end`; ``evidence`` is about ranks that failed.
    """
    failure = describe_failure(state) or ""
    if failure and state.hung is None:
        failure = f"on {host}, {failure}"
    trouble = find_trouble(state, host)
    if state.broken is not None:
        text = f"on {host}, {state.broken.headline}"
        trouble = MeshrunError(text, exit_code=state.broken.exit_code)
    failed = {failed.rank for failed in failed_ranks(state)}
    left = [
        (rank_state.finished_ns, rank)
        for rank, rank_state in state.ranks.items()
        if rank_state.finished_ns
    ]
    reported = failed | {rank for _, rank in sorted(left)[:1]}
    return NodeOutcome(
        headline=describe_end(state, layout, hosts, host).headline,
        signum=state.signals[0] if state.signals else 0,
        is_well=_all_succeeded(state),
        killed=state.killed,
        is_hung=state.hung is not None,
        step=state.step,
        failure=failure,
        trouble=None if trouble is None else Trouble.of(trouble),
        ranks={rank: state.ranks[rank] for rank in sorted(reported)},
        evidence={rank: evidence[rank] for rank in reported if rank in evidence},
    )


def build_result(
    state: State,
    layout: Layout,
    *,
    hosts: Sequence[str],
    timings: Timings,
    log_folder: str | None = None,
    evidence: Mapping[int, Evidence] = MappingProxyType({}),
) -> LaunchResult:
    """Return the result of a launch whose last state is ``state``.

    What another node found out about its ranks takes precedence over ``evidence`` from here.
    """
    nodes = state.nodes
    for outcome in state.outcomes:
        evidence = {**evidence, **outcome.evidence}
    over, is_spare = nodes.launch_over, _is_spare(state)
    ending = describe_end(state, layout, hosts, "")
    ranks = failed_ranks(state) if ending.exit_code and not is_spare else []
    failures = [
        _failure(state, layout, failed, hosts, evidence.get(failed.rank, _NOTHING))
        for failed in ranks
    ]
    own = hosts[0] if nodes.is_coordinator and not nodes.is_alone else ""
    signum = ending.signum if own else next(iter(state.signals), None)
    if over is not None and over.signum is None:
        signum = None  # it arrived after the decision
    return LaunchResult(
        exit_code=ending.exit_code,
        signum=signum,
        stopped_elsewhere=ending.headline if signum is not None and not state.signals else "",
        failures=tuple(failures),
        broken_program=state.broken.text if state.broken else None,
        trouble=find_trouble(state, own) if signum is None else None,
        generation=None if is_spare else state.generation,
        restarts=state.restarts,
        resizes=tuple(cause.resize for cause in state.causes if cause.resize is not None),
        no_restart=state.no_restart,
        best_steps=(*(cause.step for cause in state.causes), state.best_step),
        log_folder=log_folder,
        preempted=ending.preempted if over is None else over.preempted,
        elsewhere=over.headline if over is not None and not own else "",
        timings=timings,
    )


def describe_end(state: State, layout: Layout, hosts: Sequence[str], host: str) -> Ending:
    """Return how the launch ends, on all nodes if this one is the coordinator.

    ``hosts`` are those of the nodes, in node order, and ``host`` is this one. If several things
    happened, a signal comes first, then a broken program, what :func:`find_trouble` returns, and a
    failed rank.
    """
    signum, preempted = _stop_signal(state), _was_preempted(state, others=len(hosts) - 1)
    exit_code, headline, trouble = 0, "", None
    if signum is not None:
        exit_code = PREEMPTED if preempted else exit_code_of(signum)
        if state.signals:
            headline = f"{host} was {why_stopped(state)}"
        else:
            headline = next(each.headline for each in state.outcomes if each.signum)
    elif state.broken is not None:
        exit_code = state.broken.exit_code
        headline = (f"on {host}, " if len(hosts) > 1 else "") + state.broken.headline
    elif (trouble := find_trouble(state, host if len(hosts) > 1 else "")) is not None:
        exit_code, headline = trouble.exit_code, trouble.message
    elif failures := failed_ranks(state):
        first = failures[0]
        exit_code = exit_code_of(first.signum, first.exit_code) or 1
        where = f" on {hosts[layout.node_rank(first.rank)]}" if len(hosts) > 1 else ""
        headline = f"{rank_name(layout, first.rank)}{where} {describe_failed_rank(first)}"
    if state.nodes.launch_over is not None:
        exit_code = state.nodes.launch_over.exit_code
    return Ending(
        exit_code=exit_code,
        signum=signum,
        preempted=preempted,
        headline=headline,
        trouble=None if trouble is None else Trouble.of(trouble),
    )


def _is_spare(state: State) -> bool:
    """Return whether the launch ended without this node; its ranks are of an earlier generation."""
    over = state.nodes.launch_over
    if over is None or state.nodes.is_coordinator:
        return False
    has_run = any(rank_state.pid is not None for rank_state in state.ranks.values())
    return over.generation != state.generation or not has_run


def why_stopped(state: State) -> str:
    """Return what stopped the launcher: ``stopped by SIGTERM``."""
    why = state.why_signalled
    return f"stopped because {why}" if why else f"stopped by {signal_name(state.signals[0])}"


def _stop_signal(state: State) -> int | None:
    """Return the first signal that stopped this launcher, or else that of another node."""
    signums = (*state.signals, *(outcome.signum for outcome in state.outcomes))
    return next((signum for signum in signums if signum), None)


def _all_succeeded(state: State) -> bool:
    """Return whether every rank of this node exited with 0."""
    return all(rank_state.exited_well for rank_state in state.ranks.values())


def _failure(
    state: State, layout: Layout, failed: FailedRank, hosts: Sequence[str], evidence: Evidence
) -> RankFailure:
    traceback = failed.raised.traceback if failed.raised else ""
    explains_itself = failed.raised is not None and not failed.raised.handled
    return RankFailure(
        rank=failed.rank,
        coordinate=layout.coordinate(failed.rank),
        label=rank_label(layout, failed.rank) if layout.mesh else "",
        host=hosts[layout.node_rank(failed.rank) if len(hosts) > 1 else 0],
        pid=state.all_ranks[failed.rank].pid or 0,
        exit_code=failed.exit_code,
        signum=failed.signum,
        at_ns=failed.at_ns,
        raised=failed.raised,
        asked_to_end=failed.asked_to_end,
        is_consequence=failed.is_consequence,
        place=user_place(traceback, current_folder()) or evidence.place,
        why=evidence.why,
        stack=evidence.stack,
        last_lines=() if explains_itself else evidence.last_lines,
    )


def _was_preempted(state: State, *, others: int) -> bool:
    """Return whether SIGTERM to a launcher stopped the ranks, and all of them exited with 0.

    Of a node that was lost, it is not known. One that leaves an elastic launch reports on itself.
    """
    nodes = state.nodes
    leaves = not (nodes.policy.needs_all or nodes.is_coordinator or nodes.lost is not None)
    return (
        _stop_signal(state) == signal.SIGTERM
        and any(rank_state.asked_to_end_ns is not None for rank_state in state.ranks.values())
        and _all_succeeded(state)
        and all(outcome.is_well for outcome in state.outcomes)
        and (leaves or len(state.outcomes) >= others)
    )


def _trouble_elsewhere(state: State) -> MeshrunError | None:
    nodes = state.nodes
    if nodes.failed is not None:
        return nodes.failed.error
    for outcome in state.outcomes:
        if outcome.trouble is not None:
            return outcome.trouble.as_error()
    if nodes.launch_over is not None and nodes.launch_over.trouble is not None:
        return nodes.launch_over.trouble.as_error()
    if (lost := nodes.lost) is None or has_root_cause(state, before_ns=lost.heard_ns):
        return None
    if nodes.is_coordinator or nodes.launch_over is None:
        # After a third signal, node 0 does not wait for the others.
        signum = nodes.signum
        before = f"another node was stopped by {signal_name(signum)}; then " if signum else ""
        return NodeLostError(f"{before}{lost}", hint=_hint_of_loss(lost))
    return None


def _hint_of_loss(lost: NodeLost) -> str:
    if lost.is_silent:
        return (
            "check that the machine is up and the network between the nodes works; a longer"
            " --node-timeout tolerates short outages"
        )
    return "see the output of its launcher or scheduler for why it exited"


def find_trouble(state: State, host: str = "") -> MeshrunError | None:
    """Return what ended the launch from outside its ranks, or ``None``.

    A hang comes first; then a failed check, an excluded node, a process that could not be started
    and one that was lost, all on this node; and then other nodes.
    """
    if state.hung is not None:
        nothing = "none used the CPU, printed anything, or called meshrun.heartbeat()"
        return HangError(
            f"no rank made progress for {state.hung.idle_s:.1f} s: {state.hung.why or nothing}",
            hint="see where the ranks are in the stacks above; --hang-timeout sets the limit",
        )
    here = _trouble_here(state)
    if here is None:
        return _trouble_elsewhere(state)
    if host:
        here.message = f"on {host}, {here.message}"
    return here


def _hint_of_death(signum: int | None) -> str:
    if signum is None:
        return "its output above says why"
    if signum == signal.SIGKILL:
        return "unless it was killed on purpose, check `dmesg` for the out-of-memory killer"
    return "unless it was killed on purpose, its output above may say why"


def _trouble_here(state: State) -> MeshrunError | None:
    if state.failed_check is not None:
        first, *others = state.failed_check.findings
        more = f" (and {len(others)} more)" if others else ""
        return CheckError(
            f"--check-first did not start the program: {first}{more}",
            hint="run --check in place of the program to measure everything",
        )
    if (event := state.excluded) is not None:
        is_program = event.found_by == "program"
        did = "reported that its node must not be used" if is_program else "excludes this node"
        return NodeExcludedError(
            f"{event.who} {did}: {event.reason}",
            hint=f"leave the node out: {event.remedy}",
        )
    if (failed := state.start_error) is not None:
        return HostError(describe_start_error(failed), hint=failed.hint)
    if (what := describe_lost_process(state)) is None or state.lost_process is None:
        return None
    exit_code, signum = split_wait_status(state.lost_process.wait_status)
    hint = None if state.lost_process.why else _hint_of_death(signum)
    if isinstance(state.lost_process, StoreEnded):
        return HostError(f"{what}, and the ranks need it", hint=hint)
    trouble = HostError(f"{what}, and the ranks ended with it", hint=hint)
    trouble.exit_code = exit_code_of(signum, exit_code) or InternalError.exit_code
    failed_join = state.nodes.failed
    if failed_join is not None and what in failed_join.error.message:
        # It says why the others continue without this node.
        trouble.message = failed_join.error.message
    return trouble
