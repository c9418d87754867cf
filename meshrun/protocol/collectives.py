"""The collectives that ranks have called, from torch's flight recorder. Pure values."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from meshrun.protocol.packing import Generation, Line, Rank, Time


class Call(Struct, frozen=True, kw_only=True):
    """One call of a collective on one rank."""

    number: int
    """Counts the calls of its group from 1; all ranks of a collective have the same number."""
    op: Line
    """Such as ``all_reduce``."""
    inputs: Line = ""
    """Types and shapes: ``float32[4,8]``."""
    outputs: Line = ""
    n_bytes: int = 0
    """The size of the inputs or the outputs, whichever is larger."""
    is_done: bool = False


class GroupCalls(Struct, frozen=True, kw_only=True):
    """The calls of one rank in one process group."""

    name: Line
    """torch's name for the group, the same on all of its ranks."""
    description: Line
    """torch's description of the group: ``mesh_tp`` for the groups of a dim."""
    ranks: list[Rank]
    calls: list[Call]
    """The last calls and all that are under way, in order."""


class RankListens(Struct, frozen=True, kw_only=True):
    """A rank answers requests from now on."""

    rank: Rank
    at_ns: Time
    records: bool = False
    """Whether it has a process group, and answers requests about its collectives too."""


class RankCalled(Struct, frozen=True, kw_only=True):
    """A rank's answer to :data:`ALL_CALLS`, or its report of a failed call."""

    rank: Rank
    at_ns: Time
    groups: list[GroupCalls]
    place: Line = ""
    """Where in the program the rank is, if known."""
    has_failed: bool = False
    """Whether the rank sends this unasked, as its last call has just failed."""


class RankWaits(Struct, frozen=True, kw_only=True):
    """A rank's answer to :data:`WAITS`: whether it waits in a collective, and where."""

    rank: Rank
    at_ns: Time
    place: str
    """A text that changes whenever a collective begins or ends, or the main thread calls or
    returns; "" if no collective is under way."""


class AskTimes(Struct, frozen=True, kw_only=True):
    """The coordinator to other nodes: report when ranks began their last collectives."""

    generation: Generation
    late: list[Rank] = []
    """Ranks of any node that were late at the previous request: report what delays them."""


class RankTimes(Struct, frozen=True, kw_only=True):
    """A rank's answer to :data:`TIMES`: when it began its last calls."""

    rank: Rank
    at_ns: Time
    groups: list[GroupCalls]
    """The groups, without their calls."""
    calls: list[list[int]]
    """For each call, the index of its group, its number, and its start in wall-clock ns."""

    def last(self, most: int) -> RankTimes:
        """Return the answer with only the last ``most`` calls."""
        return replace(self, calls=self.calls[-most:])

    def shifted(self, by_ns: int) -> RankTimes:
        """Return the answer by a clock that is ``by_ns`` ahead, without malformed calls."""
        valid = (call for call in self.calls if len(call) == 3 and 0 <= call[0] < len(self.groups))
        calls = [[group, number, at_ns + by_ns] for group, number, at_ns in valid]
        return replace(self, calls=calls)


RankAnswer = RankListens | RankCalled | RankWaits | RankTimes
STACKS, ALL_CALLS, WAITS, TIMES = b"s", b"c", b"w", b"t"
"""Requests to a rank: its stacks, which it writes to their file; what it has called, whether it
waits, and when it began its calls."""
