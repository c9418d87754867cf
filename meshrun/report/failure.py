"""The report of a failed launch, the cause last."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Iterator

from meshrun.protocol.raised import as_torch_prints, describe_raised, headline, lost_connection
from meshrun.protocol.result import (
    LEFT_EARLY,
    LaunchResult,
    RankFailure,
    describe_exit,
    describe_stop,
    stopped_by,
)
from meshrun.report.message import render_error
from meshrun.wording import count

_LOST = "lost a connection to a peer as a consequence"
_OBEYED = ("KeyboardInterrupt", "SystemExit")
_EXPLAINED = {
    signal.SIGKILL: "killed from outside; the kernel logged no out-of-memory kill",
    signal.SIGTERM: "not sent by meshrun",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a bad memory access, a truncated file, or a full /dev/shm",
    signal.SIGABRT: "native code aborted; the output above says why",
    signal.SIGFPE: "an arithmetic error in native code",
    signal.SIGILL: "an instruction that this processor does not support",
}


def render_failure(
    result: LaunchResult, *, reported_lost: Collection[int] = (), bare: bool = False
) -> str:
    """Return the lines to print after a launch that went wrong; "" after one that went well.

    Args:
        result: The result.
        reported_lost: Ranks whose lost connection was already reported.
        bare: Whether lines of ranks have no prefix, so that a traceback says itself whose it is.
    """
    return "\n".join(_lines(result, reported_lost, bare))


def _lines(result: LaunchResult, reported_lost: Collection[int], bare: bool) -> Iterator[str]:
    if result.signum is not None:
        if stopped_by(result) is None:
            yield from _failed(result, reported_lost, bare)
            yield ""
        well = "; every rank exited on its own with exit code 0" if result.preempted else ""
        yield f"meshrun: {describe_stop(result.signum)}{well}"
        return
    if result.broken_program is not None:
        yield result.broken_program.rstrip("\n")
        return
    if result.elsewhere:
        yield f"error: {result.elsewhere}"
        yield "       node 0 has the full report"
        return
    if result.trouble is not None:
        yield render_error(result.trouble, is_end=True)
        if result.no_restart is not None:
            yield f"       not restarted: {result.no_restart}"
        return
    if result.failures:
        yield from _failed(result, reported_lost, bare)


def _failed(result: LaunchResult, reported_lost: Collection[int], bare: bool) -> Iterator[str]:
    first, *others = result.failures
    yield from _others(
        first,
        [
            failure
            for failure in others
            if failure.rank not in reported_lost or _way(first, failure) != _LOST
        ],
    )
    yield ""
    if first.raised is not None and not first.raised.shown and not _was_quit(first):
        told = first.raised.traceback.rstrip("\n")
        yield as_torch_prints(told, first.rank) if bare else told
        yield ""
    yield from _told(first)
    yield f"error: {describe_rank(first)} {describe_end(first)}"
    at = f"{first.place}, " if first.place and not _was_quit(first) else ""
    after = f", after {count(result.restarts, 'restart')}" if result.restarts else ""
    yield f"       {at}on {first.host}, pid {first.pid}{after}"
    if result.no_restart is not None:
        yield f"       not restarted: {result.no_restart}"
    if result.log_folder is not None:
        yield f"       logs are in {result.log_folder}"


def _told(first: RankFailure) -> Iterator[str]:
    """What the rank said last, where no exception says more."""
    told = (("Python stack at the crash", first.stack), ("last lines of output", first.last_lines))
    for what, lines in told:
        if lines:
            yield f"{describe_rank(first)}, {what}:"
            yield from (f"    {line}" for line in lines)
            yield ""


def describe_rank(failure: RankFailure) -> str:
    """Return ``rank 5 [dp1 tp1]``, or ``rank 5`` without a mesh."""
    return f"rank {failure.rank} [{failure.label}]" if failure.label else f"rank {failure.rank}"


def describe_end(failure: RankFailure) -> str:
    """Return how a rank ended, in the words of its exception, its signal or its exit code."""
    end = describe_exit(failure.exit_code, failure.signum)
    if failure.signum is not None:
        why = failure.why or _EXPLAINED.get(failure.signum)  # type: ignore[call-overload]
        end += f" ({why})" if why else ""
    elif failure.exit_code == 0:
        end = LEFT_EARLY
    if _was_quit(failure):
        return f"was quit in its debugger, exit code {failure.exit_code}"
    if failure.raised is None:
        return end
    if failure.raised.kind == "SystemExit":
        return f"{end}: {headline(failure.raised).removeprefix('SystemExit: ')}"
    if failure.raised.kind == "KeyboardInterrupt" and failure.signum == signal.SIGINT:
        return describe_raised(failure.raised)  # Python ends by the signal itself
    why = f" ({failure.why})" if failure.why and failure.signum is None else ""
    end = end if failure.exit_code is None else f"exit code {failure.exit_code}"
    return f"{describe_raised(failure.raised)}{why}, {end}"


def _was_quit(failure: RankFailure) -> bool:
    """Whether the user entered ``q`` at the prompt of pdb."""
    return failure.raised is not None and failure.raised.kind == "BdbQuit"


def _others(first: RankFailure, others: list[RankFailure]) -> Iterator[str]:
    """One line for each way in which other ranks ended, however many they were."""
    ways = Counter(_way(first, failure) for failure in others)
    for way, number in ways.items():
        ranks = sorted(failure.rank for failure in others if _way(first, failure) == way)
        named = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if number > 8 else "")
        yield (
            f"meshrun: rank {named} {way}"
            if number == 1
            else f"meshrun: {number} ranks {way} ({named})"
        )


def _way(first: RankFailure, failure: RankFailure) -> str:
    if failure.is_consequence and failure.raised and lost_connection(failure.raised):
        return _LOST
    if failure.asked_to_end and (failure.raised is None or failure.raised.kind in _OBEYED):
        return "stopped as requested"
    same = first.raised is not None and failure.raised is not None
    if same and first.raised.traceback == failure.raised.traceback:  # type: ignore[union-attr]
        return "failed the same way"
    return describe_end(failure)
