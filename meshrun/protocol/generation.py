"""A generation as values: its ranks, their evidence, why it ended, or why a node withdrew. Pure.

Launchers send these values to each other; the times in them are converted to the receiver's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import Struct

from meshrun.errors import MeshrunError, RendezvousError, error_class, kind_of
from meshrun.protocol.collectives import RankCalled
from meshrun.protocol.packing import ExitCode, Line, Rank, Seconds, Signum, Time
from meshrun.protocol.rank_end import RankExited, RankRaised, aborted_for_timeout, timed_out
from meshrun.protocol.result import Resize

_Trouble = TypeVar("_Trouble", bound="Trouble")


class RankState(Struct, frozen=True, kw_only=True):
    """What a launcher knows of one rank."""

    pid: int | None = None
    joined: bool = False
    ready_ns: Time | None = None
    """When its program began."""
    raised: RankRaised | None = None
    finished_ns: Time | None = None
    """When its program succeeded, and it began to wait for its peers."""
    left_ns: Time | None = None
    """When its program ended with a status other than 0, before its connections closed."""
    exited: RankExited | None = None
    asked_to_end_ns: Time | None = None
    """When meshrun first sent it a signal to stop it."""

    @property
    def ready(self) -> bool:
        """Whether its program has begun."""
        return self.ready_ns is not None

    @property
    def finished(self) -> bool:
        """Whether its program has succeeded; it may have exited since."""
        return self.finished_ns is not None

    @property
    def exited_well(self) -> bool:
        """Whether it has exited with code 0."""
        return self.exited is not None and self.exited.wait_status == 0

    @property
    def has_timed_out(self) -> bool:
        """Whether it failed because a collective took longer than its group's timeout."""
        if self.raised is not None:
            return timed_out(self.raised.message, self.raised.traceback)
        return self.exited is not None and aborted_for_timeout(self.exited.error)


class Cause(Struct, frozen=True, kw_only=True):
    """Why a generation of ranks ended."""

    rank: Rank | None = None
    """The rank that was the cause; ``None`` if no rank was."""
    description: Line
    """How it ended, such as ``was killed by SIGKILL``; a whole sentence without a rank."""
    raised: RankRaised | None = None
    ran_s: Seconds | None = None
    """Seconds from the program's first line to its end; ``None`` if it never began."""
    at_ns: Time
    step: int | None = None
    """The furthest step that a rank of the generation reported, if any."""
    place: Line = ""
    """Where in the user's files the exception came from, if it did."""
    is_failure: bool = True
    """Whether it counts as a restart, unlike a mere change of the nodes."""
    resize: Resize | None = None
    """How the nodes changed afterwards, if they did."""


class Evidence(Struct, frozen=True):
    """What is known of a failed rank beyond how it ended."""

    last_lines: tuple[Line, ...] = ()
    """Its last lines on stderr."""
    stack: tuple[Line, ...] = ()
    """Where native code crashed, one line per frame, innermost last."""
    place: Line = ""
    """The same in brief: ``work at train.py:41``."""
    why: Line = ""
    """An explanation of its exception, or of the signal that killed it."""


class Trouble(Struct, frozen=True, kw_only=True):
    """An error of meshrun's as a message."""

    message: Line
    hint: Line | None
    exit_code: ExitCode
    kind: str = MeshrunError.__name__
    """Its class."""

    @classmethod
    def of(cls: type[_Trouble], error: MeshrunError) -> _Trouble:
        """Return the message for an error."""
        return cls(
            message=error.message,
            hint=error.hint,
            exit_code=error.exit_code,
            kind=kind_of(error),
        )

    def as_error(self) -> MeshrunError:
        """Return the error."""
        return error_class(self.kind)(self.message, hint=self.hint, exit_code=self.exit_code)


class Withdraw(Struct, frozen=True, kw_only=True):
    """A node that will not take part withdraws, before all nodes have joined."""

    host: Line
    reason: Line
    exit_code: ExitCode

    @classmethod
    def of(cls, host: str, error: MeshrunError) -> Withdraw:
        """Return the message of a node that withdraws because of ``error``."""
        return cls(host=host, reason=error.message, exit_code=error.exit_code)

    def as_error(self) -> MeshrunError:
        """Return the error that ends the launch for it."""
        return RendezvousError(
            f"{self.host} withdrew before all nodes had joined: {self.reason}",
            hint="see its output for details",
            exit_code=self.exit_code,
        )


class NodeOutcome(Struct, frozen=True, kw_only=True):
    """A node's report to the coordinator on a generation."""

    headline: Line = ""
    """The cause in one line."""
    signum: Signum = 0
    """The first signal that its launcher received; 0 for none."""
    is_well: bool = False
    """Whether every rank exited with 0."""
    killed: bool = False
    """Whether SIGKILL was sent to its ranks."""
    is_hung: bool = False
    step: int | None = None
    """The furthest step that one of its ranks reported, if any."""
    failure: Line = ""
    """What failed other than a rank, in brief, if the ranks may restart after it."""
    trouble: Trouble | None = None
    """The error that ended the generation from outside the ranks, if any."""
    ranks: Mapping[Rank, RankState] = {}
    """The ranks that failed, and the first that finished."""
    evidence: Mapping[Rank, Evidence] = {}
    calls: Mapping[Rank, RankCalled] = {}
    """In a hang, or after a timeout, the collectives of the ranks that answered."""


class Ending(Struct, frozen=True, kw_only=True):
    """How a launch ends on every node, in brief."""

    exit_code: ExitCode
    signum: Signum | None
    """The signal that stopped it, if one did."""
    preempted: bool
    headline: Line
    """The cause in one line; "" if the launch succeeded."""
    trouble: Trouble | None = None
    """The cause, if it was an error from outside the ranks."""
