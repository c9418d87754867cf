"""The result of a launch: how each rank ended, and what decided it. Pure values.

Their fields are the keys of the JSON that ``--report`` writes, whose schema is published.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from meshrun.errors import MeshrunError
from meshrun.protocol.rank_end import RankRaised, describe_raised

LEFT_EARLY = "exited with code 0 while other ranks still needed it"
"""The description of a failure with exit code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank that failed."""

    rank: int
    coordinate: tuple[int, ...]
    label: str
    """The rank by its coordinate, such as ``dp1 tp3``; empty without a mesh."""
    host: str
    pid: int
    exit_code: int | None
    """The exit code of the process, or ``None`` if a signal killed it."""
    signum: int | None
    """The signal that killed it, or ``None``."""
    at_ns: int
    """Monotonic time of the failure: of its exception, or of its exit."""
    raised: RankRaised | None
    """The exception that ended its program, if any."""
    asked_to_end: bool
    """Whether meshrun had asked it to stop before it failed."""
    is_consequence: bool = False
    """Whether it failed because another had: it was asked to stop, or lost a connection."""
    place: str = ""
    """Where in the user's files: ``all_reduce at train.py:41``, if known."""
    why: str = ""
    """An explanation of the signal that killed it, such as an out-of-memory kill."""
    stack: tuple[str, ...] = ()
    """Where native code crashed, one line per frame, innermost last."""
    last_lines: tuple[str, ...] = ()
    """Its last lines on stderr, if there is no exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When a launch reached each phase, in monotonic nanoseconds; ``None`` if it did not."""

    began_ns: int
    import_ns: int | None = None
    """How long the zygote took to import torch."""
    zygote_ready_ns: int | None = None
    last_started_ns: int | None = None
    last_joined_ns: int | None = None
    last_ready_ns: int | None = None
    last_exited_ns: int | None = None
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A change of the nodes of a launch."""

    generation: int
    """The first generation with these nodes."""
    left: tuple[str, ...]
    """Hosts that left."""
    joined: tuple[str, ...]
    """Hosts that joined."""
    shapes: str
    """How the mesh changed, such as ``dp 3 -> 4``."""
    mesh: str
    """The new mesh; "" without one."""
    hosts: tuple[str, ...]
    """All hosts, in node order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """The result of a launch."""

    exit_code: int
    """0 only if every rank returned 0 and nothing stopped the launch."""
    signum: int | None = None
    """The signal that stopped the launcher, or ``None``."""
    stopped_elsewhere: str = ""
    """Which node received this signal, in one line, if it was not this one."""
    failures: tuple[RankFailure, ...] = ()
    """Ranks that failed or were stopped; the cause first, if it was a rank."""
    broken_program: str | None = None
    """What ``python`` would have printed, if the program failed before any rank started."""
    trouble: MeshrunError | None = None
    """The error that stopped meshrun itself, or ``None``."""
    timings: Timings
    generation: int | None = None
    """The number of the last generation, from 0; ``None`` if this node was a spare in it."""
    restarts: int = 0
    """The number of restarts after failures."""
    resizes: tuple[Resize, ...] = ()
    """The changes of the nodes of an elastic launch, in order."""
    no_restart: str | None = None
    """Why the ranks were not restarted although restarts were left."""
    best_steps: tuple[int | None, ...] = ()
    """How far each generation came, by ``progress()``; ``None`` if it did not report it."""
    log_folder: str | None = None
    """Where the ranks' files are, if any were kept."""
    preempted: bool = False
    """Whether the launcher received SIGTERM and every rank then exited on its own with 0."""

    elsewhere: str = ""
    """The cause in one line, on a node other than node 0, which has the full report."""

    def raise_for_failure(self) -> None:
        """Raise RankFailed if a rank failed; do nothing if the launch succeeded."""
        if self.exit_code:
            raise RankFailed(self)


class RankFailed(MeshrunError):
    """A launch failed; ``result`` holds every failure, the cause first."""

    def __init__(self, result: LaunchResult) -> None:
        first = cause_of(result)
        where = (
            f"rank {first.rank} failed" if first else result.elsewhere or "the launch was stopped"
        )
        if (signum := stopped_by(result)) is not None:
            where = result.stopped_elsewhere or f"the launch was {describe_stop(signum)}"
        elif result.trouble is not None:
            where = result.trouble.message
        elif first and first.raised:
            where = f"rank {first.rank} {describe_raised(first.raised)}"
        elif first and first.signum is not None:
            where = f"rank {first.rank} {describe_exit(None, first.signum, first.why)}"
        if result.broken_program is not None:
            where = describe_broken(result.broken_program)
        code = result.exit_code
        super().__init__(f"{where}, exit code {code}", exit_code=code)
        self.result = result


def describe_broken(text: str) -> str:
    """Return in one line why a program did not start: its exception, or an error of meshrun's."""
    lines = text.rstrip().splitlines() or [""]
    is_ours = lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ") if is_ours else lines[-1]


def split_wait_status(status: int) -> tuple[int | None, int | None]:
    """Return (exit code, signal) of a wait status; exactly one of them is not ``None``."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None


def describe_exit(exit_code: int | None, signum: int | None, error: str = "") -> str:
    """Return how a process ended: ``was killed by SIGABRT (ERROR)``, ``exited with code 3``."""
    end = f"exited with code {exit_code}"
    if signum is not None:
        end = f"was killed by {signal_name(signum)}"
    return f"{end} ({error})" if error else end


def describe_stop(signum: int) -> str:
    """Return what stopped a launch: ``stopped by Ctrl-C, SIGINT``."""
    reasons: dict[int, str] = {signal.SIGINT: "Ctrl-C, ", signal.SIGPIPE: "a closed output pipe, "}
    return f"stopped by {reasons.get(signum, '')}{signal_name(signum)}"


def failed_by_itself(failure: RankFailure) -> bool:
    """Return whether a rank failed before it was asked to stop, and not because another had."""
    return not (failure.asked_to_end or failure.is_consequence)


def stopped_by(result: LaunchResult) -> int | None:
    """Return the signal that stopped the launcher, unless a rank failed by itself before it."""
    first = result.failures[0] if result.failures else None
    if first is None or first.signum == result.signum or not failed_by_itself(first):
        return result.signum
    interrupted = first.raised is not None and first.raised.kind == "KeyboardInterrupt"
    return result.signum if interrupted else None


def cause_of(result: LaunchResult) -> RankFailure | None:
    """Return the failure that ended the launch, if it was a rank's and is known here."""
    if not result.failures or result.trouble is not None or stopped_by(result) is not None:
        return None
    first = result.failures[0]
    return None if result.elsewhere and not failed_by_itself(first) else first


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 40`` for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
