"""Events on two nodes of two ranks each, as the coordinator and the participant see them."""

from __future__ import annotations

from meshrun.errors import RendezvousError
from meshrun.lifecycle.actions import Action, Decide, EndZygote, Report, StartAll
from meshrun.lifecycle.state import NodesState, State
from meshrun.protocol.events import (
    AllCleared,
    AllJoined,
    Event,
    GenerationAborted,
    JoinFailed,
    LaunchOver,
    NextBegins,
    NodeLost,
    OthersFinished,
)
from meshrun.protocol.generation import Cause, NodeOutcome, RankState, Trouble
from meshrun.protocol.zygote_messages import RankFinished
from tests.histories import READY, S, exited, started
from tests.histories import play as play_events
from tests.kit import HUNG_UP

OTHERS_FAILED = GenerationAborted(why="rank 2 failed", signum=0, at_ns=5 * S)
OTHERS_FINISHED = OthersFinished(at_ns=6 * S)
COORDINATOR_LOST = NodeLost(node_rank=0, host="node0", why=HUNG_UP, at_ns=5 * S, heard_ns=4 * S)
NODE_LOST = NodeLost(
    node_rank=1, host="node1", why="it stopped responding", at_ns=5 * S, heard_ns=4 * S
)
CAUSE = Cause(rank=2, description="exited with code 7", at_ns=5 * S)
NEXT = NextBegins(generation=1, cause=CAUSE, at_ns=8 * S)
JOIN_FAILED = JoinFailed(error=RendezvousError("1 of 2 nodes joined"), at_ns=5 * S)

END = EndZygote()
START = StartAll(generation=0)
FAILED, FINISHED = Report(what="failed"), Report(what="finished")
CLEARED = Report(what="cleared")
THE_END = Decide(next_after=None)


def all_joined(node_rank: int) -> AllJoined:
    ranks = (0, 1) if node_rank == 0 else (2, 3)
    return AllJoined(
        node_rank=node_rank, hosts=("node0", "node1"), nproc_per_node=(2, 2), run_id="r",
        store_address="10.0.0.1", store_port=1, own_address="10.0.0.2", at_ns=1, ranks=ranks,
    )  # fmt: skip


def finished(*ranks: int) -> list[Event]:
    return [RankFinished(rank=rank, at_ns=3 * S) for rank in ranks]


def over(
    code: int,
    headline: str = "rank 2 failed",
    signum: int | None = None,
    generation: int = 0,
) -> LaunchOver:
    return LaunchOver(
        exit_code=code, signum=signum, preempted=False, headline=headline, generation=generation,
        at_ns=9 * S,
    )  # fmt: skip


def reported(*ranks: tuple[int, int], trouble: Trouble | None = None) -> NodeOutcome:
    """Return the outcome that the other node reports: how these of its ranks ended."""
    return NodeOutcome(
        headline="rank 2 failed",
        is_well=not ranks,
        trouble=trouble,
        ranks={
            rank: RankState(pid=100 + rank, exited=exited(rank, status, 5))
            for rank, status in ranks
        },
    )


def all_cleared(*outcomes: NodeOutcome) -> AllCleared:
    return AllCleared(outcomes=outcomes, at_ns=8 * S)


COORDINATOR: list[Event] = [READY, all_joined(0), *started(0, 1)]
PARTICIPANT: list[Event] = [READY, all_joined(1), *started(2, 3)]
COORDINATOR_ENDED: list[Event] = [exited(0, 15, 6), exited(1, 15, 6)]
PARTICIPANT_ENDED: list[Event] = [exited(2, 15, 6), exited(3, 15, 6)]
DIES: list[Event] = [exited(2, 7 << 8, 5), exited(3, 15, 6)]
WELL: list[Event] = [exited(0, 0, 5), exited(1, 0, 5)]
WELL_THERE: list[Event] = [exited(2, 0, 5), exited(3, 0, 5)]

TWO_DIED = reported((2, 7 << 8), (3, 15))
TROUBLE = reported(trouble=Trouble(message="no room", hint=None, exit_code=71))


def play(events: list[Event], max_restarts: int = 0) -> tuple[State, list[Action]]:
    """Return the final state of a launch on two nodes, and the actions taken."""
    return play_events(events, max_restarts=max_restarts, ranks=2, nodes=NodesState())
