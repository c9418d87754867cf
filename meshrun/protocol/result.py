"""What came of a launch: how each rank ended, and what decided it. Pure values."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from meshrun.errors import MeshrunError
from meshrun.protocol.rank_end import RankRaised

PREEMPTED = 75
"""Exit code of a launch whose ranks took SIGTERM well: EX_TEMPFAIL of sysexits.h, try again."""
LEFT_EARLY = "exited with code 0 while other ranks still needed it"
"""How a failure with exit code 0 is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One rank that ended badly."""

    rank: int
    coordinate: tuple[int, ...]
    label: str
    """The rank by its coordinate, such as ``dp1 tp3``; empty without a mesh."""
    host: str
    pid: int
    exit_code: int | None
    """What the process returned, or ``None`` if a signal ended it."""
    signum: int | None
    """The signal that ended it, or ``None``."""
    at_ns: int
    """Monotonic time of the failure: of its exception, or of its end."""
    raised: RankRaised | None
    """The exception that left its program, if one did."""
    asked_to_end: bool
    """Whether meshrun had told it to end before it failed."""
    is_consequence: bool = False
    """Whether it failed because another had: it was told to end, or lost a connection."""
    place: str = ""
    """Where in the user's files: ``all_reduce at train.py:41``, if that is known."""
    why: str = ""
    """What explains the signal that ended it, such as the kernel's word on memory."""
    stack: tuple[str, ...] = ()
    """Where native code crashed, a line a frame, the innermost last."""
    last_lines: tuple[str, ...] = ()
    """What it printed last on stderr, if no exception tells more."""

    @property
    def shell_code(self) -> int:
        """The exit code a shell would show: the process's own, or 128 + signal."""
        return 128 + self.signum if self.signum is not None else self.exit_code or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When a start reached what, in monotonic nanoseconds; ``None`` for what it never reached."""

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
    """One change of the nodes that take part in a launch."""

    generation: int
    """Of ranks, the first with these nodes."""
    left: tuple[str, ...]
    """Hosts that do not take part any more."""
    joined: tuple[str, ...]
    """Hosts that take part from now on."""
    shapes: str
    """What became of the mesh, such as ``dp 3 -> 4``."""
    mesh: str
    """The mesh from now on; "" without one."""
    hosts: tuple[str, ...]
    """All that take part, in node order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """What came of a launch."""

    exit_code: int
    """0 only if every rank returned 0 and nothing stopped the launch."""
    signum: int | None
    """The signal that stopped the launcher, or ``None``."""
    failures: tuple[RankFailure, ...]
    """Ranks that ended badly, the cause first."""
    broken_program: str | None
    """What ``python`` would have printed, if the program failed before any rank began."""
    trouble: MeshrunError | None
    """What kept meshrun itself from going on, or ``None``."""
    timings: Timings
    restarts: int = 0
    """How often all ranks were started again after a failure."""
    resizes: tuple[Resize, ...] = ()
    """How the nodes changed, one after the other, where they may."""
    no_restart: str | None = None
    """Why they were not started again although restarts were left, if that is so."""
    best_steps: tuple[int | None, ...] = ()
    """How far each generation came, by ``progress()``; ``None`` for one that did not say."""
    log_folder: str | None = None
    """Where the ranks' files are, if any were kept."""
    preempted: bool = False
    """Whether the launcher was sent SIGTERM, and every rank then ended by itself with code 0."""

    elsewhere: str = ""
    """What decided it in one line, where node 0 has the whole report and this is another node."""

    def raise_for_failure(self) -> None:
        """Raise RankFailed if a rank failed; do nothing if the launch went well."""
        if self.exit_code:
            raise RankFailed(self)


class RankFailed(MeshrunError):
    """A launch ended badly; ``result`` holds every failure, the cause first."""

    def __init__(self, result: LaunchResult) -> None:
        first = result.failures[0] if result.failures else None
        where = f"rank {first.rank} failed" if first else "the launch was stopped"
        super().__init__(f"{where}, exit code {result.exit_code}")
        self.result = result
        self.exit_code = result.exit_code


def split_wait_status(status: int) -> tuple[int | None, int | None]:
    """Return (exit code, signal) of a wait status; exactly one of them is not ``None``."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None


def signal_name(signum: int) -> str:
    """Return ``SIGKILL`` for 9, and ``signal 40`` for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
