"""The last state of a launch -> its result: which failure was the cause, which exit code. Pure."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshrun.errors import HangError, HostError, InternalError, MeshrunError
from meshrun.events import STORE
from meshrun.layout import Layout
from meshrun.result import PREEMPTED, LaunchResult, RankFailure, Timings, split_wait_status
from meshrun.stacks import user_place
from meshrun.supervise.blame import Verdict, describe_store_end, describe_wait_status, judge
from meshrun.supervise.evidence import Evidence
from meshrun.supervise.known import State
from meshrun.supervise.label import rank_label


def went_well(state: State) -> bool:
    """Whether every rank returned 0 and nothing stopped the launch."""
    return _exit_code(state, judge(state)) == 0


def build_result(
    state: State,
    layout: Layout,
    *,
    host: str,
    timings: Timings,
    log_folder: str | None = None,
    evidence: Mapping[int, Evidence] = MappingProxyType({}),
) -> LaunchResult:
    """Return what came of a launch whose last state is ``state``."""
    verdicts = judge(state)
    nothing = Evidence()
    failures = [
        _failure(state, layout, verdict, host, evidence.get(verdict.rank, nothing))
        for verdict in verdicts
    ]
    signum = state.signals[0] if state.signals else None
    return LaunchResult(
        exit_code=_exit_code(state, verdicts),
        signum=signum,
        failures=tuple(failures),
        broken_program=state.broken.text if state.broken else None,
        trouble=_trouble(state) if signum is None else None,
        restarts=state.generation,
        no_restart=state.no_restart,
        log_folder=log_folder,
        preempted=_was_preempted(state),
        timings=timings,
    )


def _failure(
    state: State, layout: Layout, verdict: Verdict, host: str, evidence: Evidence
) -> RankFailure:
    traceback = verdict.raised.traceback if verdict.raised else ""
    return RankFailure(
        rank=verdict.rank,
        coordinate=layout.coordinate(verdict.rank),
        label=rank_label(layout, verdict.rank) if layout.mesh else "",
        host=host,
        pid=state.ranks[verdict.rank].pid or 0,
        exit_code=verdict.exit_code,
        signum=verdict.signum,
        at_ns=verdict.at_ns,
        raised=verdict.raised,
        asked_to_end=verdict.asked_to_end,
        is_consequence=verdict.is_consequence,
        place=user_place(traceback, os.getcwd()) or evidence.place,
        why=evidence.why,
        stack=evidence.stack,
        last_lines=() if traceback else evidence.last_lines,
    )


def _was_preempted(state: State) -> bool:
    """Whether ranks were told to end by SIGTERM to the launcher, and all did as they should."""
    ranks = state.ranks.values()
    told = any(known.told_to_end_ns is not None for known in ranks)
    well = all(known.exited is not None and known.exited.wait_status == 0 for known in ranks)
    return state.signals[:1] == (signal.SIGTERM,) and told and well


def _exit_code(state: State, verdicts: Sequence[Verdict]) -> int:
    if state.signals:
        return PREEMPTED if _was_preempted(state) else 128 + state.signals[0]
    if state.broken is not None:
        return state.broken.exit_code
    if (trouble := _trouble(state)) is not None:
        return trouble.exit_code
    if not verdicts:
        return 0
    first = verdicts[0]
    return 128 + first.signum if first.signum is not None else first.exit_code or 1


def _trouble(state: State) -> MeshrunError | None:
    """Return what ended the launch from outside its ranks, or ``None``."""
    if state.hung is not None:
        return HangError(
            f"no rank got on for {state.hung.idle_s:.1f} s: none used its CPU, printed, or called"
            " meshrun.heartbeat()",
            hint="where they were stands above; --hang-timeout says how long they may take",
        )
    if state.start_error is not None:
        rank = state.start_error.rank
        who = "the process that holds the ranks' store" if rank == STORE else f"rank {rank}"
        return HostError(
            f"{who} could not be started: {state.start_error.error}",
            hint="is the machine out of processes or memory? see `ulimit -u` and `free -h`",
        )
    if (store_end := describe_store_end(state)) is not None:
        return HostError(f"{store_end}, and they need it")
    gone = state.zygote_gone
    if gone is None or state.broken is not None or gone.wait_status == 0:
        return None
    all_exited = all(known.exited is not None for known in state.ranks.values())
    if state.finishing or (all_exited and not state.between):
        return None
    end = describe_wait_status(gone.wait_status)
    trouble = HostError(
        f"the process that starts the ranks {end}, and they with it",
        hint="if nobody did this on purpose, look for the out-of-memory killer in `dmesg`",
    )
    exit_code, signum = split_wait_status(gone.wait_status)
    trouble.exit_code = 128 + signum if signum is not None else exit_code or InternalError.exit_code
    return trouble
