"""In any order of events, phases follow each other as the diagrams of lifecycle.md say."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.lifecycle.actions import StartAll
from meshrun.lifecycle.nodes_policy import ELASTIC, FIXED, NodesPolicy
from meshrun.lifecycle.phases import Link, NodesPhase, Phase, Stop
from meshrun.lifecycle.state import NodesState, State
from meshrun.protocol.events import (
    AllCleared,
    Event,
    GenerationAborted,
    Hung,
    LaunchBegan,
    NodeLost,
    RankLate,
    SignalArrived,
    TimePassed,
    ZygoteGone,
)
from meshrun.protocol.from_zygote import (
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
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited
from meshrun.rendezvous.node_phases import ConnectionPhase, CoordinatorPhase, ParticipantPhase
from meshrun.ssh.host_phases import AgentPhase, ControllerPhase, HostPhase
from tests.diagrams import DIAGRAMS, FOLLOWS, SEEN, unseen
from tests.histories import KILLED_ZYGOTE, READY, S, follow, launch, raised
from tests.node_histories import (
    NEXT,
    NOT_MET,
    OTHERS_FAILED,
    OTHERS_FINISHED,
    TWO_DIED,
    all_cleared,
    met,
    over,
    play,
    reported,
)
from tests.unit import test_elastic_state, test_other_nodes, test_state_generations

RANK = st.integers(0, 1)
SIGNUM = st.sampled_from([2, 13, 15])
LOCAL: list[Callable[[int], st.SearchStrategy[Event]]] = [
    lambda at: st.just(LaunchBegan(at_ns=at)),
    lambda at: st.just(ZygoteReady(at_ns=at, import_ns=0)),
    lambda _: st.just(ZygoteUnsafe(reason="threads")),
    lambda _: st.just(ProgramBroken(text="", exit_code=1)),
    lambda at: st.builds(RankStarted, rank=RANK, pid=st.just(7), at_ns=st.just(at)),
    lambda at: st.just(StartFailed(rank=0, error="no memory", at_ns=at)),
    lambda at: st.builds(RankJoined, rank=RANK, at_ns=st.just(at)),
    lambda at: st.builds(RankReady, rank=RANK, at_ns=st.just(at)),
    lambda at: st.builds(raised, RANK, st.just(at / S)),
    lambda at: st.builds(RankBeat, rank=RANK, at_ns=st.just(at), step=st.integers(0, 3)),
    lambda at: st.builds(RankLeaves, rank=RANK, at_ns=st.just(at)),
    lambda at: st.builds(RankFinished, rank=RANK, at_ns=st.just(at)),
    lambda at: st.builds(
        RankExited, rank=RANK, pid=st.just(7), wait_status=st.sampled_from([0, 9, 256]),
        at_ns=st.just(at),
    ),
    lambda at: st.just(StoreEnded(wait_status=9, at_ns=at)),
    lambda at: st.just(GenerationEnded(at_ns=at)),
    lambda at: st.builds(ZygoteGone, wait_status=st.sampled_from([0, 9]), at_ns=st.just(at)),
    lambda at: st.builds(SignalArrived, signum=SIGNUM, at_ns=st.just(at)),
    lambda at: st.just(Hung(idle_s=5.0, at_ns=at)),
    lambda at: st.builds(
        NodeExcluded, rank=RANK, reason=st.just("slow"), remedy=st.just(""), at_ns=st.just(at)
    ),
    lambda at: st.builds(
        Checked, rank=st.just(0), findings=st.sampled_from([[], ["slow"]]),
        hosts=st.sampled_from([[], ["a"]]), speeds=st.just(""), at_ns=st.just(at),
    ),
    lambda _: st.just(RanksResumed(stopped_ns=S)),
    lambda _: st.just(LeftoversEnded(count=1, survivors=[])),
    lambda at: st.builds(
        RankLate, rank=RANK, group=st.just("dp"), share=st.sampled_from([0.0, 0.2]),
        per_call_s=st.just(0.1), at_ns=st.just(at),
    ),
    lambda at: st.just(TimePassed(at_ns=at)),
]  # fmt: skip
ELSEWHERE: list[Callable[[int], st.SearchStrategy[Event]]] = [
    lambda _: st.sampled_from(
        [met(0), met(1), NOT_MET, replace(NOT_MET, joined=met(1)), NEXT, OTHERS_FINISHED, over(7)]
    ),
    lambda at: st.builds(
        NodeLost, node_rank=RANK, host=st.just("a"), why=st.just("gone"), at_ns=st.just(at)
    ),
    lambda at: st.builds(
        GenerationAborted, why=st.just("rank 2 failed"), signum=st.sampled_from([0, 15]),
        at_ns=st.just(at), resizes=st.booleans(),
    ),
    lambda at: st.just(AllCleared(outcomes=(reported((2, 7 << 8)),), at_ns=at)),
]  # fmt: skip


@st.composite
def histories(
    draw: st.DrawFn, kinds: list[Callable[[int], st.SearchStrategy[Event]]]
) -> list[Event]:
    """Return events of these kinds in any order, seconds apart."""
    at_ns, events = 0, []
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=40)):
        at_ns += draw(st.sampled_from([0, S, 40 * S]))
        events.append(draw(kind(at_ns)))
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


def test_killed_ranks_stay_killed() -> None:
    """Also if the nodes then fail to meet."""
    signals: list[Event] = [SignalArrived(signum=2, at_ns=0)] * 3
    state = State(shutdown_timeout_s=30.0, ranks={0: RankState()}, nodes=NodesState())

    follow(state, *signals, NOT_MET)


@given(histories(LOCAL), st.integers(0, 2))
def test_one_node_keeps_to_the_diagrams(events: list[Event], max_restarts: int) -> None:
    """With and without restarts."""
    ranks = {0: RankState(), 1: RankState()}
    follow_all(State(shutdown_timeout_s=30.0, ranks=ranks, max_restarts=max_restarts), events)


@given(histories([*LOCAL, *ELSEWHERE]), st.integers(0, 2), st.sampled_from([FIXED, ELASTIC]))
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
    play([met(0), OTHERS_FAILED, all_cleared(TWO_DIED), broken, NEXT], max_restarts=1)

    assert [unseen(kind) for kind in (Phase, Stop, NodesPhase, Link)] == [[]] * 4


def test_only_last_phases_have_no_way_out() -> None:
    """A launch that is over stays over, and no other phase is a dead end."""
    last = {each for follows in FOLLOWS.values() for each in follows if not follows[each]}

    assert last == {
        Phase.OVER, NodesPhase.OVER, NodesPhase.ALONE, Link.CUT_OFF, ConnectionPhase.CLOSED,
        CoordinatorPhase.OVER,
        ParticipantPhase.STAYING, ParticipantPhase.OVER, ParticipantPhase.FAILED,
        ControllerPhase.ENDING, ControllerPhase.RESTARTING, HostPhase.DONE, AgentPhase.OVER,
    }  # fmt: skip
    for kind, diagram in DIAGRAMS.items():
        assert f"[*] --> {next(iter(kind)).name.lower()}\n" in diagram
        assert [f"{each.name.lower()} --> [*]" in diagram for each in kind] == [
            each in last for each in kind
        ]
