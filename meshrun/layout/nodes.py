"""Ranks on nodes: rank <-> (node, local rank). Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index

from meshrun.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes with workers on them, as many on each or not.

    Slots are numbered node by node, and rank r takes slot r, unless a class on top says otherwise.

    Args:
        nproc_per_node: Number of workers on each node, in node order.
        own_rank: The rank of this process, or ``None`` where there is none.

    Raises:
        LayoutError: If no node has a worker, or ``own_rank`` is outside the world; in every
            method, if a rank is, or if it is left out and there is no own rank.
    """

    nproc_per_node: tuple[int, ...]
    own_rank: int | None = field(default=None, compare=False)
    world_size: int = field(init=False, repr=False, compare=False)
    """Number of ranks over all nodes."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """First rank of each node, then the world size; empty where all nodes are alike."""

    def __post_init__(self) -> None:
        counts = tuple(self.nproc_per_node)
        if not counts:
            raise LayoutError(
                "expected at least one node", hint="nproc_per_node=(8, 8) describes two nodes"
            )
        if (fewest := min(counts)) < 0 or not any(counts):
            node = counts.index(fewest)
            raise LayoutError(
                f"numbers of workers cannot be negative or all 0: node {node} has {fewest}"
            )
        object.__setattr__(self, "nproc_per_node", counts)
        is_even = counts.count(counts[0]) == len(counts)
        starts = () if is_even else tuple(accumulate(counts, initial=0))
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "world_size", starts[-1] if starts else counts[0] * len(counts))
        if self.own_rank is not None:
            self._known(self.own_rank)

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.nproc_per_node)

    def node_rank(self, rank: int | None = None) -> int:
        """Return the node that a rank runs on, ``0 <= node_rank < nnodes``."""
        return self.slot(rank)[0]

    def local_rank(self, rank: int | None = None) -> int:
        """Return the place of a rank among the workers of its node."""
        return self.slot(rank)[1]

    def slot(self, rank: int | None = None) -> tuple[int, int]:
        """Return (node rank, local rank)."""
        number = self.slot_number(rank)
        if self._starts:
            node_rank = bisect_right(self._starts, number) - 1
            return node_rank, number - self._starts[node_rank]
        return divmod(number, self.nproc_per_node[0])

    def slot_number(self, rank: int | None = None) -> int:
        """Return the place of a rank among the slots of all nodes, node by node."""
        return self._known(rank)

    def rank_in_slot(self, number: int) -> int:
        """Return the rank in a slot, by the slot's number; the inverse of :meth:`slot_number`."""
        return self._known(number)

    def rank_at(self, node_rank: int, local_rank: int) -> int:
        """Return the rank in a slot; the inverse of :meth:`slot`.

        Raises:
            LayoutError: If there is no such slot.
        """
        ranks = self.ranks_of_node(node_rank)
        if not 0 <= local_rank < len(ranks):
            raise LayoutError(
                f"node {node_rank} has no local rank {local_rank}",
                hint=f"its local ranks range from 0 to {len(ranks) - 1}",
            )
        return ranks[local_rank]

    def ranks_of_node(self, node_rank: int) -> range | list[int]:
        """Return the ranks that run on a node, in order of their local ranks.

        Raises:
            LayoutError: If there is no such node.
        """
        counts = self.nproc_per_node
        if not 0 <= node_rank < len(counts):
            raise LayoutError(
                f"node {node_rank} does not exist", hint=f"nodes range from 0 to {len(counts) - 1}"
            )
        first = self._starts[node_rank] if self._starts else node_rank * counts[0]
        slots = range(first, first + counts[node_rank])
        return slots if self._takes_own_slots else [self.rank_in_slot(slot) for slot in slots]

    @property
    def _takes_own_slots(self) -> bool:
        """Whether rank r takes slot r."""
        return True

    def _known(self, rank: int | None) -> int:
        """Return the rank that is meant, once it is known to be one."""
        if rank is None:
            if self.own_rank is None:
                hint = "pass a rank; only current_layout() knows the rank of its process"
                raise LayoutError("this layout does not belong to a rank", hint=hint)
            return self.own_rank
        rank = index(rank)  # a number of numpy or torch becomes a plain one
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a world of {self.world_size}")
        return rank
