"""What a check measures, from the ranks to the report: dataclasses that become JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RESULT_FILE = "MESHRUN_CHECK_FILE"
"""Names the file in which rank 0 leaves what all ranks have measured."""

Op = Literal["all_reduce", "all_gather", "all_to_all"]

BUS_FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0}
"""Times ``(n - 1) / n``, what a byte of the buffer moves over the slowest link of n ranks.

Source:
    nccl-tests, "Performance reported by NCCL tests", bus bandwidth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One operation of one size in the group of a dim, as one rank saw it."""

    dim: str
    op: Op
    bytes: int
    """The whole buffer: what all_reduce reduces, what all_gather and all_to_all result in."""
    seconds: float
    """Of one call, the mean of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """As much in each direction between this rank and one of another node, or another rank."""

    peer: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasures:
    """What one rank found."""

    rank: int
    host: str
    facts: dict[str, str]
    """What must be the same everywhere, such as versions."""
    clock_s: float
    """By how much its clock is ahead of rank 0's, as far as messages tell."""
    shares_cores: bool
    """Whether ranks compute with fewer cores than there are ranks, so that speeds are by chance."""
    shm_bytes: int | None
    """The size of /dev/shm."""
    gpu_free_bytes: int | None = None
    gpu_bytes: int | None = None
    paths: dict[str, str] = field(default_factory=dict)
    """What is wrong with each path, "" if it can be written."""
    gflops: float
    """Of a matrix product."""
    collectives: list[Collective]
    unsupported: list[str]
    """Operations that the backend does not have."""
    exchanges: list[Exchange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What all ranks found, by rank."""

    layout: Any
    """As ``Layout.to_dict()`` gives it."""
    ranks: list[RankMeasures]
