"""What came of a generation of ranks on one node, as plain values that travel. Pure.

Those that :mod:`meshrun.lifecycle.outcome_json` makes, field by field.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any, TypedDict

from meshrun.protocol.packing import Within
from meshrun.protocol.printable import one_line
from meshrun.protocol.result import split_wait_status

_LATEST_NS = 2**62
_MOST = 2**31


def _wait_status(status: int) -> int:
    """Return the wait status of a process that has ended."""
    Within(0, 0xFFFF)(status)
    split_wait_status(status)
    return status


def _rank(text: str) -> str:
    """Return a rank that is the name of something."""
    Within(0, _MOST)(int(text))
    return text


Line = Annotated[str, one_line]
"""For people; made fit to be shown."""
Time = Annotated[int, Within(-_LATEST_NS, _LATEST_NS)]
ExitCode = Annotated[int, Within(0, 255)]
Signum = Annotated[int, Within(0, 64)]
"""A signal, or 0 for none."""
Rank = Annotated[int, Within(0, _MOST)]
Seconds = Annotated[float, Within(0, 10**12)]


class Raised(TypedDict):
    """A :class:`meshrun.protocol.events.RankRaised`."""

    rank: Rank
    at_ns: Time
    kind: Line
    message: str
    traceback: str
    shown: bool


class _Exited(TypedDict):
    rank: Rank
    pid: int
    wait_status: Annotated[int, _wait_status]
    at_ns: Time


class Exited(_Exited, total=False):
    """A :class:`meshrun.protocol.events.RankExited`."""

    unasked: bool


class RankEnd(TypedDict, total=False):
    """A :class:`meshrun.lifecycle.state.RankState`."""

    pid: int | None
    joined: bool
    ready_ns: Time | None
    raised: Raised | None
    finished_ns: Time | None
    exited: Exited | None
    told_to_end_ns: Time | None


class Evidence(TypedDict):
    """A :class:`meshrun.lifecycle.evidence.Evidence`."""

    last_lines: list[Line]
    stack: list[Line]
    place: Line
    why: Line


class Trouble(TypedDict):
    """A :class:`meshrun.errors.MeshrunError`."""

    message: Line
    hint: Line | None
    exit_code: ExitCode


class Resize(TypedDict):
    """A :class:`meshrun.protocol.result.Resize`."""

    generation: int
    left: list[Line]
    joined: list[Line]
    shapes: Line
    mesh: Line
    hosts: list[Line]


class _Cause(TypedDict):
    rank: Rank | None
    description: Line
    raised: Raised | None
    ran_s: Seconds | None
    at_ns: Time


class Cause(_Cause, total=False):
    """A :class:`meshrun.lifecycle.state.Cause`."""

    step: int | None
    place: Line
    is_failure: bool
    resize: Resize | None


class Outcome(TypedDict, total=False):
    """What a node tells of its ranks."""

    headline: Line
    signum: Signum
    is_well: bool
    killed: bool
    is_hung: bool
    step: int | None
    failure: Line
    trouble: Trouble | None
    ranks: dict[Annotated[str, _rank], RankEnd]
    evidence: dict[Annotated[str, _rank], Evidence]


def shift_times(outcome: dict[str, Any], by_ns: int) -> None:
    """Turn the times of another node's clock into ours, in place."""
    _shift(outcome.get("ranks"), by_ns)


def shift_cause(cause: dict[str, Any], by_ns: int) -> dict[str, Any]:
    """Return the cause of a restart with its times in another clock."""
    shifted = copy.deepcopy(cause)
    _shift(shifted, by_ns)
    return shifted


def _shift(value: Any, by_ns: int) -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            if name.endswith("_ns") and isinstance(each, int):
                value[name] = each + by_ns
            else:
                _shift(each, by_ns)
