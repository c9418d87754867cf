"""A generation as values: each rank, its evidence, why it ended. Pure.

Launchers send these values to each other, and shift their times from one clock to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from meshrun.errors import MeshrunError
from meshrun.protocol.checked import ExitCode, Line, Rank, Seconds, Signum, Time
from meshrun.protocol.collectives import RankCalled
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import Resize

_Trouble = TypeVar("_Trouble", bound="Trouble")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of one rank."""

    pid: int | None = None
    joined: bool = False
    ready_ns: Time | None = None
    """When its program began."""
    raised: RankRaised | None = None
    finished_ns: Time | None = None
    """When its program was over and it began to wait for its peers, if it has one to wait for."""
    left_ns: Time | None = None
    """When its program was over with another status than 0, before its connections closed."""
    exited: RankExited | None = None
    told_to_end_ns: Time | None = None
    """When it was first sent a signal to end it, if it was."""

    @property
    def ready(self) -> bool:
        """Whether its program has begun."""
        return self.ready_ns is not None

    @property
    def finished(self) -> bool:
        """Whether its program has ended and it waits for its peers, or has waited."""
        return self.finished_ns is not None

    def shifted(self, by_ns: int) -> RankState:
        """Return it with its times in another machine's clock, ahead by ``by_ns``."""
        return replace(
            self,
            ready_ns=_later(self.ready_ns, by_ns),
            raised=None if self.raised is None else self.raised.shifted(by_ns),
            finished_ns=_later(self.finished_ns, by_ns),
            left_ns=_later(self.left_ns, by_ns),
            exited=None if self.exited is None else self.exited.shifted(by_ns),
            told_to_end_ns=_later(self.told_to_end_ns, by_ns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a generation of ranks ended."""

    rank: Rank | None
    """The rank that was the cause; ``None`` if it was none of them."""
    description: Line
    """How it ended, such as ``was ended by SIGKILL``; a whole sentence if it was no rank."""
    raised: RankRaised | None
    ran_s: Seconds | None
    """Seconds from the program's first line to its end; ``None`` if it never began."""
    at_ns: Time
    step: int | None = None
    """How far any rank of the generation came, if one said."""
    place: Line = ""
    """Where in the user's files, if an exception came from there."""
    is_failure: bool = True
    """Whether it counts as a restart, and not only nodes came or went."""
    resize: Resize | None = None
    """How the nodes changed then, if they did."""

    def shifted(self, by_ns: int) -> Cause:
        """Return it with its times in another machine's clock, ahead by ``by_ns``."""
        raised = None if self.raised is None else self.raised.shifted(by_ns)
        return replace(self, at_ns=self.at_ns + by_ns, raised=raised)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a failed rank beside its end."""

    last_lines: tuple[Line, ...] = ()
    """What it printed last on stderr."""
    stack: tuple[Line, ...] = ()
    """Where native code crashed, a line a frame, the innermost last."""
    place: Line = ""
    """The same in short: ``work at train.py:41``."""
    why: Line = ""
    """What explains the signal that ended it, or its exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An error of meshrun's, as it travels."""

    message: Line
    hint: Line | None
    exit_code: ExitCode

    @classmethod
    def of(cls: type[_Trouble], error: MeshrunError) -> _Trouble:
        """Return an error as a value."""
        return cls(message=error.message, hint=error.hint, exit_code=error.exit_code)

    def as_error(self) -> MeshrunError:
        """Return the error."""
        error = MeshrunError(self.message, hint=self.hint)
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """What one node tells the coordinator of its ranks."""

    headline: Line = ""
    """What decided it, in one line."""
    signum: Signum = 0
    """The signal that its launcher was sent first."""
    is_well: bool = False
    """Whether every rank returned 0."""
    killed: bool = False
    is_hung: bool = False
    step: int | None = None
    """How far a rank came, if one said."""
    failure: Line = ""
    """What failed that was no rank, in a few words, if ranks may start again after it."""
    trouble: Trouble | None = None
    """What ended the generation from outside the ranks, if anything did."""
    ranks: Mapping[Rank, RankState] = field(default_factory=dict)
    """Those that failed, and the first that left."""
    evidence: Mapping[Rank, Evidence] = field(default_factory=dict)
    calls: Mapping[Rank, RankCalled] = field(default_factory=dict)
    """The collectives of ranks that were asked, in a hang."""

    def shifted(self, by_ns: int) -> NodeOutcome:
        """Return it with its times in another machine's clock, ahead by ``by_ns``."""
        ranks = {rank: state.shifted(by_ns) for rank, state in self.ranks.items()}
        return replace(self, ranks=ranks)


def _later(at_ns: int | None, by_ns: int) -> int | None:
    return None if at_ns is None else at_ns + by_ns
