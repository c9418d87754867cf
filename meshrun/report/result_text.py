"""Results and errors as text: the report of a failed launch, with its cause last, and timings."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator
from dataclasses import replace

from meshrun.errors import MeshrunError, RendezvousError, SpecError
from meshrun.host.printable import lines
from meshrun.protocol import rank_end
from meshrun.protocol.result import (
    LEFT_EARLY,
    LaunchResult,
    RankFailure,
    Timings,
    describe_exit,
    describe_stop,
    failed_by_itself,
    stopped_by,
)
from meshrun.wording import count, listed

_LOST = f"{rank_end.LOST_PEER} as a consequence"
_STOP_EXCEPTIONS = ("KeyboardInterrupt", "SystemExit")
_SIGNAL_HINTS = {
    signal.SIGKILL: "killed from outside; the kernel logged no out-of-memory kill",
    signal.SIGTERM: "not sent by meshrun",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a bad memory access, a truncated file, or a full /dev/shm",
    signal.SIGABRT: "native code aborted; its output says why",
    signal.SIGFPE: "an arithmetic error in native code",
    signal.SIGXCPU: "at the limit of CPU time, of `ulimit -t` or of the job",
    signal.SIGILL: "an instruction that this processor does not support",
}


def render_error(error: MeshrunError, *, is_end: bool = False) -> str:
    """Return the lines to print for an error.

    If it ended a launch, the hint comes first, as the last line is the cause.
    """
    parts = [f"error: {error.message}"]
    if isinstance(error, SpecError):
        parts.append(error.marked)
    if error.hint:
        parts.insert(0 if is_end else len(parts), f"hint: {error.hint}")
    return lines("\n\n".join(parts))  # a quoted value may come from anywhere, such as a hostfile


def render_failure(
    result: LaunchResult, *, reported_lost: Collection[int] = (), bare: bool = False
) -> str:
    """Return the lines to print after a launch that failed; "" if it succeeded.

    The lost connections of ``reported_lost`` ranks are left out. If the lines of ranks are
    ``bare`` of prefixes, a traceback names its rank.
    """
    first = result.failures[:1]
    others = [
        failure
        for failure in result.failures[1:]
        if failure.rank not in reported_lost or _way(first[0], failure) != _LOST
    ]
    return "\n".join(_lines(replace(result, failures=(*first, *others)), bare=bare))


def _lines(result: LaunchResult, *, bare: bool) -> Iterator[str]:
    if result.signum is not None:
        if stopped_by(result) is None:
            yield from _failed(result, bare=bare)
            yield ""
        well = "; every rank exited on its own with exit code 0" if result.preempted else ""
        yield f"meshrun: {result.stopped_elsewhere or describe_stop(result.signum)}{well}"
    elif result.broken_program is not None:
        yield result.broken_program.rstrip("\n")
    elif result.elsewhere:
        yield f"error: {result.elsewhere}"
        yield "       node 0 has the full report"
    elif result.trouble is not None:
        is_cut_off = isinstance(result.trouble, RendezvousError)
        if is_cut_off and any(map(failed_by_itself, result.failures[:1])):  # no other reports it
            yield from _failed(result, bare=bare)
            yield ""
        yield render_error(result.trouble, is_end=True)
        if result.no_restart is not None:
            yield f"       not restarted: {result.no_restart}"
    elif result.failures:
        yield from _failed(result, bare=bare)


def _failed(result: LaunchResult, *, bare: bool) -> Iterator[str]:
    first, *others = result.failures
    yield from _others(first, others)
    yield ""
    if traceback := _traceback(first):
        yield rank_end.as_torch_prints(traceback, first.rank) if bare else traceback
        yield ""
    yield from _evidence(first)
    yield f"error: {describe_rank(first)} {describe_rank_end(first)}"
    at = f"{first.place}, " if first.place and not _was_quit(first) else ""
    after = f", after {count(result.restarts, 'restart')}" if result.restarts else ""
    yield f"       {at}on {first.host}, pid {first.pid}{after}"
    if result.no_restart is not None:
        yield f"       not restarted: {result.no_restart}"
    if result.log_folder is not None:
        yield f"       logs are in {result.log_folder}"


def _traceback(first: RankFailure) -> str:
    """Return a traceback, or a text given to ``sys.exit()``, unless other lines have all of it."""
    if first.raised is None or first.raised.shown or _was_quit(first):
        return ""
    text = first.raised.traceback.rstrip("\n")
    return "" if describe_rank_end(first).endswith(f"exited with code 1: {text}") else text


def _evidence(first: RankFailure) -> Iterator[str]:
    """Yield the stack of a rank at its crash and its last lines, if they are known."""
    for title, shown in (
        ("Python stack at the crash", first.stack),
        ("last lines of output", first.last_lines),
    ):
        if shown:
            yield f"{describe_rank(first)}, {title}:"
            yield from (f"    {line}" for line in shown)
            yield ""


def describe_rank(failure: RankFailure) -> str:
    """Return ``rank 5 [dp1 tp1]``, or ``rank 5`` without a mesh."""
    return f"rank {failure.rank} [{failure.label}]" if failure.label else f"rank {failure.rank}"


def describe_rank_end(failure: RankFailure) -> str:
    """Return how a rank ended: by its exception, its signal or its exit code."""
    end = describe_exit(failure.exit_code, failure.signum)
    if failure.signum is not None:
        why = failure.why or _SIGNAL_HINTS.get(failure.signum)  # type: ignore[call-overload]
        end += f" ({why})" if why else ""
    elif failure.exit_code == 0:
        end = LEFT_EARLY
    if _was_quit(failure):
        return f"was quit from its debugger, exit code {failure.exit_code}"
    if failure.raised is None:
        return end
    if failure.raised.kind == "SystemExit":
        return f"{end}: {rank_end.headline(failure.raised).removeprefix('SystemExit: ')}"
    if failure.raised.kind == "KeyboardInterrupt" and failure.signum == signal.SIGINT:
        return rank_end.describe_raised(failure.raised)  # after which Python ends by the signal
    why = f" ({failure.why})" if failure.why and failure.signum is None else ""
    end = end if failure.exit_code is None else f"exit code {failure.exit_code}"
    return f"{rank_end.describe_raised(failure.raised)}{why}, {end}"


def _was_quit(failure: RankFailure) -> bool:
    """Whether the user entered ``q`` at the prompt of pdb."""
    return failure.raised is not None and failure.raised.kind == "BdbQuit"


def _others(first: RankFailure, others: list[RankFailure]) -> Iterator[str]:
    """Yield one line for each way in which other ranks ended."""
    ways: dict[str, list[int]] = {}
    for failure in others:
        ways.setdefault(_way(first, failure), []).append(failure.rank)
    for way, ranks in ways.items():
        named = listed(sorted(ranks))
        yield (
            f"meshrun: rank {named} {way}"
            if len(ranks) == 1
            else f"meshrun: {len(ranks)} ranks {re.sub('^was ', 'were ', way)} ({named})"
        )


def _way(first: RankFailure, failure: RankFailure) -> str:
    if failure.is_consequence and failure.raised and rank_end.lost_connection(failure.raised):
        return _LOST
    if failure.asked_to_end and (failure.raised is None or failure.raised.kind in _STOP_EXCEPTIONS):
        return "stopped as requested"
    if first.raised and failure.raised and first.raised.traceback == failure.raised.traceback:
        return "failed the same way"
    has_same_reason = failure.raised is not None and failure.why == first.why
    return describe_rank_end(replace(failure, why="") if has_same_reason else failure)


def render_timings(timings: Timings) -> str:
    """Return one line per phase, in seconds; phases that were not reached are omitted."""
    began = timings.began_ns
    imported = timings.zygote_ready_ns
    steps = [
        ("launcher, until torch is imported", began, imported),
        ("  of which the import itself", 0, timings.import_ns),
        ("ranks started", imported, timings.last_started_ns),
        ("ranks in the process group", timings.last_started_ns, timings.last_joined_ns),
        ("mesh ready, program starts", timings.last_joined_ns or imported, timings.last_ready_ns),
        ("program", timings.last_ready_ns, timings.last_exited_ns),
        ("end", timings.last_exited_ns, timings.ended_ns),
        ("all", began, timings.ended_ns),
    ]
    return "\n".join(
        f"meshrun: {name:<34}{max(0, end - start) / 1e9:8.3f} s"
        for name, start, end in steps
        if start is not None and end is not None
    )
