"""What is said about ranks that wait in collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.reactor import Reactor
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.state import State
from meshrun.plan.plan import build_plan
from meshrun.protocol.collectives import Call, GroupCalls, RankCalled, RankListens
from meshrun.protocol.events import AllCleared
from meshrun.protocol.generation import Evidence, NodeOutcome, RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.supervisor.monitor import Monitor
from tests.plans import request_of

NO_PROCESS = 2**30


def monitor_of(mesh: str, nnodes: int, printed: list[str], reactor: Reactor) -> Monitor:
    """Return a monitor whose notes are appended to a list."""
    request = request_of(mesh=parse_mesh(mesh), nnodes=nnodes)
    plan = build_plan(request, UNKNOWN_HOST, check_host=False)
    console: Any = SimpleNamespace(note=printed.append, print_line=lambda *_, **__: None)
    return Monitor(plan, console, reactor, emit=lambda _: None)


def test_a_rank_that_has_left_is_named_when_nccl_times_out() -> None:
    """NCCL's ranks on the same machine do not notice; the flight recorder of one rank is read."""
    printed: list[str] = []
    aborted = RankExited(
        rank=0, pid=1, wait_status=6, at_ns=2, error="Watchdog caught collective operation timeout"
    )
    left = RankExited(rank=2, pid=3, wait_status=0, at_ns=1)
    reactor = Reactor()
    monitor = monitor_of("dp=3", 1, printed, reactor)
    monitor.pipes.open(1)
    monitor.receive(RankListens(rank=1, at_ns=0, records=True))
    ranks = {
        0: RankState(pid=1, exited=aborted),
        1: RankState(pid=NO_PROCESS),
        2: RankState(pid=3, exited=left),
    }
    monitor.begin(reactor, State(shutdown_timeout_s=1, ranks=ranks))
    monitor.on_event(aborted, State(shutdown_timeout_s=1, ranks=ranks))
    calls = [Call(number=4, op="all_reduce")]
    group = GroupCalls(name="0", description="mesh_dp", ranks=[0, 1, 2], calls=calls)
    monitor.receive(RankCalled(rank=1, at_ns=3, groups=[group]))
    while not monitor.why:
        reactor.turn()

    assert printed[0].startswith("a collective timed out")
    assert monitor.why == (
        "in the dp group {0-2}, rank 1 waits in all_reduce #4, and rank 0 has timed out, and rank 2"
        " has exited with code 0"
    )
    monitor.close()
    reactor.close()


def test_a_rank_of_another_node_that_is_missing_in_a_timeout_is_named() -> None:
    """Once all nodes have reported the calls of their ranks; in what they found out, too."""
    printed: list[str] = []
    reactor = Reactor()
    monitor = monitor_of("dp=4", 2, printed, reactor)
    late = RankRaised(
        rank=2, at_ns=5, kind="RuntimeError", message="[/gloo/transport/tcp/b.cc:1] Timed out",
        traceback="", shown=False,
    )  # fmt: skip
    here = {rank: RankState(pid=NO_PROCESS) for rank in (0, 1)}
    state = State(shutdown_timeout_s=1, ranks=here)
    monitor.begin(reactor, state)
    in_it, before = [Call(number=2, op="all_reduce")], [Call(number=1, op="barrier", is_done=True)]
    calls = {
        rank: RankCalled(
            rank=rank,
            at_ns=3,
            groups=[GroupCalls(name="0", description="default", ranks=[0, 1, 2, 3], calls=made)],
        )
        for rank, made in enumerate([in_it, in_it, in_it, before])
    }
    for rank in here:
        monitor.receive(calls.pop(rank))
    why = "ranks 2-3 wait in all_reduce #2, and ranks 0-1 are on another node"
    outcome = NodeOutcome(
        ranks={2: RankState(raised=late)}, evidence={2: Evidence(why=why)}, calls=calls
    )
    cleared = monitor.explain_wait(state, AllCleared(outcomes=(outcome,), at_ns=9))
    monitor.close()
    reactor.close()

    expected = "in the group of all ranks, ranks 0-2 wait in all_reduce #2, which rank 3 has not"
    assert printed == [f"{expected} called"]
    assert monitor.why == cleared.why_hung == cleared.outcomes[0].evidence[2].why == printed[0]
