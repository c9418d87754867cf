"""A node that loses the coordinator ends by itself, whatever it is doing."""

from __future__ import annotations

import pytest

from meshrun.lifecycle.actions import Action, EndZygote
from meshrun.lifecycle.advance import advance
from meshrun.lifecycle.state import NodesState, State
from meshrun.protocol.events import Event, LaunchBegan, Met, NodeLost, ZygoteGone
from meshrun.protocol.from_zygote import GenerationEnded, RankStarted, ZygoteReady
from meshrun.protocol.rank_end import RankExited

LOST = NodeLost(node_rank=0, host="node0", why="silence", at_ns=5)
ENDED = GenerationEnded(at_ns=6)
EXITED = RankExited(rank=1, pid=7, wait_status=1 << 8, at_ns=4)


def run(state: State, *events: Event) -> tuple[State, list[Action]]:
    """Return the state after some events, and all actions."""
    done: list[Action] = []
    for event in events:
        state, actions = advance(state, event)
        done += actions
    return state, done


def participant() -> State:
    """Return the participant of two nodes, with one running rank."""
    state, _ = run(
        State(shutdown_timeout_s=1.0, ranks={1: None}, nodes=NodesState()),  # type: ignore[dict-item]
        LaunchBegan(at_ns=0),
        ZygoteReady(import_ns=1, at_ns=1),
        Met(
            node_rank=1,
            hosts=("node0", "node1"),
            nproc_per_node=(1, 1),
            run_id="j",
            store_address="10.77.0.1",
            store_port=1,
            own_address="10.77.0.2",
            ranks=(1,),
            at_ns=2,
        ),
        RankStarted(rank=1, pid=7, at_ns=3),
    )
    return state


@pytest.mark.parametrize(
    "events",
    [(LOST, EXITED), (EXITED, LOST, ENDED), (EXITED, ENDED, LOST)],
    ids=["running", "clearing up", "waiting"],
)
def test_the_coordinator_may_be_lost_at_any_moment(events: tuple[Event, ...]) -> None:
    """While its rank runs, while leftover processes are being ended, and after that."""
    state, done = run(participant(), *events)
    over, _ = run(state, ZygoteGone(wait_status=0, at_ns=9))

    assert sum(isinstance(action, EndZygote) for action in done) == 1
    assert over.over
