"""The pairs of each round of exchanges: any two meet once, as in a tournament. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from meshrun.layout import Layout


def pairs_of(layout: Layout, rank: int, most_rounds: int) -> Iterator[int | None]:
    """Yield the peer of a rank in each round, ``None`` for a round that it sits out.

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
