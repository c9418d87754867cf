"""Launches as sequences of events: constructors of events, and a function that replays them."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

from meshrun.lifecycle import advance
from meshrun.lifecycle.actions import Action, EndGeneration, EndZygote, SignalRanks
from meshrun.lifecycle.local import LEFTOVER_GRACE_S
from meshrun.lifecycle.state import ALONE, NodesState, State
from meshrun.protocol.events import Event, SignalArrived, TimePassed, ZygoteGone
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.zygote_messages import GenerationEnded, RankStarted, StoreEnded, ZygoteReady
from tests.diagrams import check_step

S = 1_000_000_000


def started(*ranks: int) -> list[Event]:
    return [RankStarted(rank=rank, pid=100 + rank, at_ns=0) for rank in ranks]


def exited(rank: int, status: int, at_s: float) -> RankExited:
    return RankExited(rank=rank, pid=100 + rank, wait_status=status, at_ns=int(at_s * S))


def raised(rank: int, at_s: float, message: str = "bad", kind: str = "RuntimeError") -> RankRaised:
    return RankRaised(
        rank=rank,
        at_ns=int(at_s * S),
        kind=kind,
        message=message,
        traceback=f"{kind}: {message}\n",
        shown=False,
    )


def signalled(signum: int, at_s: float) -> SignalArrived:
    return SignalArrived(signum=signum, at_ns=int(at_s * S))


def passed(at_s: float) -> TimePassed:
    return TimePassed(at_ns=int(at_s * S))


def term(*ranks: int) -> SignalRanks:
    return SignalRanks(ranks=ranks, signum=signal.SIGTERM)


def kill(*ranks: int) -> SignalRanks:
    return SignalRanks(ranks=ranks, signum=signal.SIGKILL)


READY = ZygoteReady(at_ns=0, import_ns=0)
STARTED = started(0, 1, 2)
"""All ranks of a launch that `play` makes, unless a test sets their number."""
GONE = ZygoteGone(wait_status=0, at_ns=99 * S)
LOST_STORE = StoreEnded(wait_status=9, at_ns=5 * S)
KILLED_ZYGOTE = ZygoteGone(wait_status=9, at_ns=99 * S)
ENDED = GenerationEnded(at_ns=7 * S)

FINISH = EndZygote(grace_s=LEFTOVER_GRACE_S)
CLEAR = EndGeneration(grace_s=LEFTOVER_GRACE_S)
BY_FORCE = EndZygote(by_force=True)


def launch(ranks: int = 3, **changes: Any) -> State:
    """Return the state of a launch of some ranks, none of which was started."""
    rank_states = {rank: RankState() for rank in range(ranks)}
    return State(shutdown_timeout_s=30.0, ranks=rank_states, **changes)


def follow(state: State, *events: Event) -> tuple[State, list[Action]]:
    """Return the state after some events, and the actions taken; check each change of a phase."""
    taken: list[Action] = []
    for event in events:
        before = state
        state, actions = advance(state, event)
        check_step(before, state)
        taken.extend(actions)
    return state, taken


def play(
    events: Iterable[Event],
    max_restarts: int = 0,
    *,
    ranks: int = 3,
    nodes: NodesState = ALONE,
) -> tuple[State, list[Action]]:
    """Return the final state of a launch, and the actions taken."""
    return follow(launch(ranks, max_restarts=max_restarts, nodes=nodes), *events)
