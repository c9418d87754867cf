"""The measurements of a check: values that become JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

Op = Literal["all_reduce", "all_gather", "all_to_all"]

BUS_FACTOR: Mapping[Op, float] = {"all_reduce": 2.0, "all_gather": 1.0, "all_to_all": 1.0}
"""Traffic on the slowest link of n ranks per byte of the buffer, divided by ``(n - 1) / n``.

Source:
    nccl-tests, "Performance reported by NCCL tests", bus bandwidth.
"""


class Collective(Struct, frozen=True, kw_only=True):
    """One operation of one size in the group of a dim, as one rank saw it."""

    dim: str
    op: Op
    bytes: int
    """Size of the whole buffer: all_reduce's input, all_gather's and all_to_all's output."""
    seconds: float
    """Mean time of a call."""


class PeerExchange(Struct, frozen=True, kw_only=True):
    """A simultaneous exchange of ``bytes`` in each direction between this rank and a peer."""

    peer: int
    bytes: int
    seconds: float


class RankMeasures(Struct, frozen=True, kw_only=True):
    """The measurements of one rank."""

    rank: int
    host: str
    facts: dict[str, str]
    """Facts that must be the same everywhere, such as versions."""
    clock_s: float
    """How far its clock is ahead of rank 0's, estimated from messages."""
    shares_cores: bool
    """Whether ranks compute on fewer cores than there are ranks, so that speeds are random."""
    shm_bytes: int | None
    """The size of /dev/shm."""
    gpu_free_bytes: int | None = None
    gpu_bytes: int | None = None
    paths: dict[str, str] = {}
    """The problem of each path; "" if it is writable."""
    gflops: float
    """Speed of a matrix product."""
    collectives: list[Collective]
    unsupported: list[str]
    """Operations that the backend does not have."""
    exchanges: list[PeerExchange]


class Measured(Struct, frozen=True, kw_only=True):
    """The measurements of all ranks."""

    layout: Any
    """The value of ``Layout.to_dict()``."""
    ranks: list[RankMeasures]
    """Ordered by rank."""

    @property
    def shares_cores(self) -> bool:
        """Whether speeds are random, because some ranks share cores."""
        return any(rank.shares_cores for rank in self.ranks)
