"""In any order of events, phases follow each other as the diagrams of lifecycle.md say."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshrun.lifecycle import local, other_nodes
from meshrun.lifecycle.actions import StartAll
from meshrun.lifecycle.phases import ExitBarrier, Link, NodesPhase, Phase, Stop
from meshrun.lifecycle.state import ELASTIC, FIXED, NodesPolicy, NodesState, State
from meshrun.protocol.events import (
    AllCleared,
    AllJoined,
    Event,
    GenerationAborted,
    Hung,
    JoinFailed,
    LaunchBegan,
    LaunchOver,
    NextBegins,
    NodeLost,
    OthersFinished,
    RankLate,
    SignalArrived,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.zygote_messages import (
    Checked,
    GenerationEnded,
    LeftoversEnded,
    NodeExcluded,
    ProgramBroken,
    RankBeat,
    RankFinished,
    RankJoined,
    RankLeaves,
    RankReady,
    RanksResumed,
    RankStarted,
    StartFailed,
    StoreEnded,
    ZygoteReady,
    ZygoteUnsafe,
)
from meshrun.rendezvous.node_phases import ConnectionPhase, CoordinatorPhase, ParticipantPhase
from meshrun.ssh.host_phases import AgentPhase, ControllerPhase, HostPhase
from tests.diagrams import DIAGRAMS, FOLLOWS, SEEN, unseen
from tests.histories import ENDED, KILLED_ZYGOTE, READY, S, exited, follow, launch
from tests.node_histories import (
    CAUSE,
    JOIN_FAILED,
    NEXT,
    OTHERS_FAILED,
    PARTICIPANT,
    TWO_DIED,
    WELL_THERE,
    all_cleared,
    all_joined,
    finished,
    play,
    reported,
)
from tests.unit import test_elastic_state, test_other_nodes, test_state_generations

Fields = dict[str, list[Any]]
"""The values that each field of an event may have."""
RANKS = [0, 1]
LOCAL: dict[type[Any], Fields] = {
    LaunchBegan: {},
    ZygoteReady: {"import_ns": [0]},
    ZygoteUnsafe: {"reason": ["threads"]},
    ProgramBroken: {"text": [""], "exit_code": [1]},
    RankStarted: {"rank": RANKS, "pid": [7]},
    StartFailed: {"rank": [0], "error": ["no memory"]},
    RankJoined: {"rank": RANKS},
    RankReady: {"rank": RANKS},
    RankRaised: {
        "rank": RANKS, "kind": ["ValueError"], "message": ["bad"], "traceback": [""],
        "shown": [False], "threads": ["", "writer"],
    },
    RankBeat: {"rank": RANKS, "step": [0, 1, 2, 3]},
    RankLeaves: {"rank": RANKS},
    RankFinished: {"rank": RANKS},
    RankExited: {"rank": RANKS, "pid": [7], "wait_status": [0, 9, 256]},
    StoreEnded: {"wait_status": [9]},
    GenerationEnded: {},
    ZygoteGone: {"wait_status": [0, 9]},
    SignalArrived: {"signum": [2, 13, 15]},
    Hung: {"idle_s": [5.0]},
    NodeExcluded: {"rank": RANKS, "reason": ["slow"], "remedy": [""]},
    Checked: {
        "rank": [0], "findings": [[], ["slow"]], "hosts": [[], ["a"]], "speeds": [""],
        "seconds": [1.0],
    },
    RanksResumed: {"stopped_ns": [S]},
    LeftoversEnded: {"count": [1], "survivors": [[]]},
    RankLate: {"rank": RANKS, "group": ["dp"], "share": [0.0, 0.2], "per_call_s": [0.1]},
    TimePassed: {},
}  # fmt: skip
ELSEWHERE: dict[type[Any], Fields] = {
    AllJoined: {
        "node_rank": [0, 1], "hosts": [("a", "b")], "nproc_per_node": [(2, 2)], "run_id": ["r"],
        "store_address": ["10.0.0.1"], "store_port": [1], "own_address": ["10.0.0.2"],
        "ranks": [(0, 1), (2, 3)],
    },
    JoinFailed: {"error": [JOIN_FAILED.error], "joined": [None, all_joined(1)]},
    NodeLost: {"node_rank": [0, 1], "host": ["a"], "why": ["gone"], "heard_ns": [0]},
    GenerationAborted: {"why": ["rank 2 failed"], "signum": [0, 15], "resizes": [False, True]},
    OthersFinished: {},
    AllCleared: {"outcomes": [(reported((2, 7 << 8)),)]},
    NextBegins: {"generation": [1], "cause": [CAUSE]},
    LaunchOver: {
        "exit_code": [7], "signum": [None], "preempted": [False], "headline": ["rank 2 failed"],
        "generation": [0],
    },
}  # fmt: skip


@st.composite
def histories(draw: st.DrawFn, kinds: dict[type[Any], Fields]) -> list[Event]:
    """Return events of these kinds in any order, seconds apart."""
    at_ns, events = 0, []
    for kind in draw(st.lists(st.sampled_from([*kinds]), max_size=40)):
        at_ns += draw(st.sampled_from([0, S, 40 * S]))
        fields = {name: draw(st.sampled_from(values)) for name, values in kinds[kind].items()}
        events.append(kind(**fields, **({"at_ns": at_ns} if hasattr(kind, "at_ns") else {})))
    return events


def follow_all(state: State, events: list[Event]) -> None:
    """Play events of the ranks that this node has."""
    for event in events:
        if getattr(event, "rank", 0) not in state.ranks:
            continue  # a rank of another node
        state, actions = follow(state, event)
        if any(isinstance(action, StartAll) for action in actions):
            assert (state.phase, state.stop) == (Phase.RUNNING, Stop.NONE), event
        if isinstance(event, TimePassed):  # else the loop would send it again at once
            assert state.wake_ns is None or state.wake_ns > event.at_ns


def test_every_event_is_played() -> None:
    """Those that each module handles."""
    assert LOCAL.keys() == local.HANDLERS.keys()
    assert ELSEWHERE.keys() == other_nodes.HANDLERS.keys()


def test_killed_ranks_stay_killed() -> None:
    """Also if the nodes then fail to join."""
    signals: list[Event] = [SignalArrived(signum=2, at_ns=0)] * 3
    state = State(shutdown_timeout_s=30.0, ranks={0: RankState()}, nodes=NodesState())

    follow(state, *signals, JOIN_FAILED)


@given(histories(LOCAL), st.integers(0, 2))
def test_one_node_keeps_to_the_diagrams(events: list[Event], max_restarts: int) -> None:
    """With and without restarts."""
    ranks = {0: RankState(), 1: RankState()}
    follow_all(State(shutdown_timeout_s=30.0, ranks=ranks, max_restarts=max_restarts), events)


@given(histories(LOCAL | ELSEWHERE), st.integers(0, 2), st.sampled_from([FIXED, ELASTIC]))
def test_a_node_of_several_keeps_to_the_diagrams(
    events: list[Event], max_restarts: int, policy: NodesPolicy
) -> None:
    """As coordinator and as participant, however nodes join and leave."""
    nodes = NodesState(policy=policy)
    ranks = {0: RankState(), 1: RankState(), 2: RankState(), 3: RankState()}
    state = State(shutdown_timeout_s=30.0, ranks=ranks, max_restarts=max_restarts, nodes=nodes)
    follow_all(state, events)


def test_every_arrow_is_followed() -> None:
    """By lawful histories, most of which are there for the actions that they lead to."""
    SEEN.clear()
    for _, events, _ in test_state_generations.RESTARTS.values():
        follow(launch(3, max_restarts=1), *events)
    for events, _ in test_other_nodes.HISTORIES.values():
        play(events)
    for events, _ in test_elastic_state.HISTORIES.values():
        test_elastic_state.play(events)
    for max_restarts in (0, 1):
        play([READY, KILLED_ZYGOTE], max_restarts)
    broken = ProgramBroken(text="SyntaxError: x", exit_code=1)
    play([all_joined(0), OTHERS_FAILED, all_cleared(TWO_DIED), broken, NEXT], max_restarts=1)
    play([*PARTICIPANT, *WELL_THERE, OTHERS_FAILED, ENDED, NEXT])
    play([*PARTICIPANT, *finished(2), exited(3, 7 << 8, 5), exited(2, 0, 6), ENDED, NEXT])

    kinds = (Phase, Stop, ExitBarrier, NodesPhase, Link)
    assert {kind: unseen(kind) for kind in kinds} == {kind: [] for kind in kinds}


def test_only_last_phases_have_no_way_out() -> None:
    """A launch that is over stays over, and no other phase is a dead end."""
    last = {each for follows in FOLLOWS.values() for each in follows if not follows[each]}

    assert last == {
        Phase.OVER, NodesPhase.OVER, NodesPhase.ALONE, Link.CLOSED, ConnectionPhase.CLOSED,
        CoordinatorPhase.OVER,
        ParticipantPhase.LINGERING, ParticipantPhase.OVER, ParticipantPhase.FAILED,
        ControllerPhase.ENDING, ControllerPhase.RESTARTING, HostPhase.DONE, AgentPhase.OVER,
    }  # fmt: skip
    for kind, diagram in DIAGRAMS.items():
        assert f"[*] --> {next(iter(kind)).name.lower()}\n" in diagram
        assert [f"{each.name.lower()} --> [*]" in diagram for each in kind] == [
            each in last for each in kind
        ]
