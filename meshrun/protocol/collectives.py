"""The collectives that ranks have called, as torch's flight recorder has them. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshrun.protocol.checked import Line, Rank, Time


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a collective on one rank."""

    number: int
    """Of the calls of its group, from 1; the same on every rank for the same collective."""
    op: Line
    """Such as ``all_reduce``."""
    inputs: Line = ""
    """Types and shapes: ``float32[4,8]``."""
    outputs: Line = ""
    n_bytes: int = 0
    """Of the larger of both."""
    is_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """What one rank has called in one process group."""

    name: Line
    """torch's, the same on all of its ranks."""
    description: Line
    """torch's: ``mesh_tp`` for the groups of a dim."""
    ranks: list[Rank]
    calls: list[Call]
    """The last ones, and all that are under way, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecords:
    """A rank has a process group, and answers questions about its collectives from now on."""

    rank: Rank
    at_ns: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalled:
    """A rank's answer: what it has called."""

    rank: Rank
    at_ns: Time
    groups: list[GroupCalls]
    place: Line = ""
    """Where in the program the rank is, if that is known."""
    has_failed: bool = False
    """Whether that is not an answer: the last call has just failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """A rank's answer: whether it waits in a collective, and where."""

    rank: Rank
    at_ns: Time
    place: str
    """Changes as soon as a collective begins or ends, or the main thread calls or returns;
    "" if no collective is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """A rank's answer: when it began its last calls."""

    rank: Rank
    at_ns: Time
    groups: list[GroupCalls]
    """Without calls."""
    calls: list[list[int]]
    """Of each the index of its group, its number there, and when it began in wall-clock ns."""

    def last(self, most: int) -> RankTimes:
        """Return it with the last calls alone."""
        return replace(self, calls=self.calls[-most:])

    def shifted(self, by_ns: int) -> RankTimes:
        """Return it by a clock that is ahead by so much, without calls of groups it lacks."""
        sound = (call for call in self.calls if len(call) == 3 and 0 <= call[0] < len(self.groups))
        calls = [[group, number, at_ns + by_ns] for group, number, at_ns in sound]
        return replace(self, calls=calls)


FromRecorder = RankRecords | RankCalled | RankWaits | RankTimes
ALL_CALLS, WAITS, TIMES = b"c", b"w", b"t"
"""The questions: what a rank has called, whether it waits, and when it began its calls."""
