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
"""Most orders without an answer; more could fill both directions of the zygote's socket."""


class StartOrders:
    """Ranks that are still to be started, one for each answer of the zygote."""

    def __init__(self, send: Callable[[RankPlan], None]) -> None:
        self._send = send
        self._waiting: deque[RankPlan] = deque()

    def begin(self, ranks: Iterable[RankPlan]) -> None:
        """Order the first of these ranks."""
        self._waiting.extend(ranks)
        for _ in range(_AHEAD):
            self.send_next()

    def send_next(self) -> None:
        """Send the next order, at the start and after each answer."""
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
        rank: The rank's plan.
        environment: Variables to add to the zygote's own, which was started without the user's
            thread variables.
        lazy: Whether the program builds the mesh.
        label: The rank's coordinate as text.
        stdin: Whether the rank reads our stdin.
        debug: The rank that is debugged, if any; the others continue at breakpoints.
        imports: Modules to import before the mesh is built.
        learn_to: The file that records at its end what it imported; "" for none.
        check: What to check before the program, as in ``codec.StartRank``.

    Raises:
        HostError: If the variables do not fit into an order.
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
