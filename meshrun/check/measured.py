"""What a check measures: values that become JSON, and the pairs of ranks that exchange data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from meshrun.layout import Layout

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


def pairs_of(layout: Layout, rank: int, most_rounds: int) -> Iterator[int | None]:
    """Yield the peer of a rank in each round of exchanges, ``None`` for one that it sits out.

    With several nodes, ranks of two nodes with the same local rank meet, so that all ranks use the
    link between these nodes at once. On a single node, any two ranks meet.
    """
    if layout.nnodes > 1:
        node, local_rank = layout.slot(rank)
        for other in meetings(layout.nnodes, node, most_rounds):
            has = other is not None and local_rank < layout.nproc_per_node[other]
            yield layout.rank_at(other, local_rank) if has and other is not None else None
    else:
        yield from meetings(layout.world_size, rank, most_rounds)


def meetings(number: int, own: int, most_rounds: int) -> Iterator[int | None]:
    """Yield the opponent of player ``own`` of ``number`` in each round, ``None`` for a bye.

    Source:
        The circle method of round-robin tournaments: one stays, the others rotate by a place.
    """
    places = number + number % 2
    for turn in range(min(places - 1, most_rounds)):
        if own == places - 1:
            other = turn
        elif own == turn:
            other = places - 1
        else:
            other = (2 * turn - own) % (places - 1)
        yield other if other < number else None
