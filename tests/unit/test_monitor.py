"""What is said about ranks that wait in collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.reactor import Reactor
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.state import State
from meshrun.plan.plan import build_plan
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.collectives import Call, GroupCalls, RankCalled, RankListens
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited
from meshrun.supervisor.monitor import Monitor

NO_PROCESS = 2**30


def test_a_rank_that_has_left_is_named_when_nccl_times_out() -> None:
    """NCCL's ranks on the same machine do not notice; the flight recorder of one rank is read."""
    program = Program(kind="script", target="train.py")
    request = LaunchRequest(program=program, mesh=parse_mesh("dp=3"))
    plan = build_plan(request, UNKNOWN_HOST, check_host=False)
    printed: list[str] = []
    console: Any = SimpleNamespace(note=printed.append, print_line=lambda *_, **__: None)
    aborted = RankExited(
        rank=0, pid=1, wait_status=6, at_ns=2, error="Watchdog caught collective operation timeout"
    )
    left = RankExited(rank=2, pid=3, wait_status=0, at_ns=1)
    reactor = Reactor()
    monitor = Monitor(plan, console, reactor, emit=lambda _: None)
    monitor.pipes.open(1)
    monitor.receive(RankListens(rank=1, at_ns=0, records=True))
    ranks = {
        0: RankState(pid=1, exited=aborted),
        1: RankState(pid=NO_PROCESS),
        2: RankState(pid=3, exited=left),
    }
    monitor.begin(reactor, State(shutdown_timeout_s=1, ranks=ranks))
    monitor.see(aborted, State(shutdown_timeout_s=1, ranks=ranks))
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
