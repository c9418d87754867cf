"""The orders that start ranks, sent a few at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from meshrun.errors import HostError
from meshrun.plan.plan import RankPlan
from meshrun.plan.rank_env import THREAD_VARIABLES
from meshrun.protocol import codec

_AHEAD = 16
"""Orders the zygote has not answered; more could fill both directions of its socket."""


class StartOrders:
    """Ranks that are still to be started; each answer of the zygote lets the next one go."""

    def __init__(self, send: Callable[[RankPlan], None]) -> None:
        self._send = send
        self._waiting: deque[RankPlan] = deque()

    def begin(self, ranks: Iterable[RankPlan]) -> None:
        """Order the first of these ranks."""
        self._waiting.extend(ranks)
        for _ in range(_AHEAD):
            self.answered()

    def answered(self) -> None:
        """An order was carried out, or was not: there is room for another."""
        if self._waiting:
            self._send(self._waiting.popleft())

    def clear(self) -> None:
        """Start no more of them."""
        self._waiting.clear()


def start_order(
    rank: RankPlan,
    environment: dict[str, str],
    *,
    lazy: bool,
    label: str = "",
    stdin: bool = True,
    debug: int | None = None,
    imports: Sequence[str] = (),
    learn_to: str = "",
    check: tuple[str, ...] = (),
) -> codec.StartRank:
    """Return the order to start a rank.

    Args:
        rank: What is planned for it.
        environment: Variables to set over the zygote's own, which was started without the user's
            own thread variables.
        lazy: Whether the mesh is left for the program to build.
        label: Its coordinate as people read it.
        stdin: Whether it reads ours.
        debug: The rank that is debugged, if one is; the others pass their breakpoints.
        imports: Modules to import before the mesh is built.
        learn_to: The file in which it says at its end what it imported; "" for none.
        check: What is checked before the program, as ``codec.StartRank`` has it.

    Raises:
        HostError: If the variables are more than an order can hold.
    """
    if debug not in {None, rank.rank}:
        environment = {**environment, "PYTHONBREAKPOINT": "0"}
    own_threads = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    order = codec.StartRank(
        rank=rank.rank,
        environment={**own_threads, **environment},
        unset=[
            name for name in THREAD_VARIABLES if name not in os.environ and name not in environment
        ],
        coordinate=list(rank.coordinate),
        local_rank=rank.local_rank,
        lazy=lazy,
        cpus=list(rank.cpus or ()),
        label=label,
        stdin=stdin,
        debug=debug == rank.rank,
        imports=list(imports),
        learn_to=learn_to,
        check=check,
    )
    if (size := len(codec.encode(order))) > codec.PACKET_BYTES:
        longest = max(order.environment, key=lambda name: len(order.environment[name]))
        raise HostError(
            f"a rank's environment takes {size} bytes, but the limit is {codec.PACKET_BYTES}:"
            f" {longest} alone takes {len(order.environment[longest])}",
            hint="write the data to a file and pass its path to the program",
        )
    return order
