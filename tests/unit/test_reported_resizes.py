"""Each change of nodes is reported, even if another follows before its ranks run."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.console.console import Console
from meshrun.host.machine import HostFacts
from meshrun.lifecycle.phases import NodesPhase
from meshrun.lifecycle.state import NodesState, State
from meshrun.plan.plan import build_plan, complete_plan
from meshrun.plan.rank_program import Program
from meshrun.protocol.events import LaunchBegan, Met, TimePassed
from meshrun.protocol.generation import Cause, RankState
from meshrun.protocol.result import Resize
from meshrun.report.progress import StartProgress

NOT_YET = {0: RankState()}
READY = {0: RankState(pid=7, joined=True, ready_ns=1)}


def change(generation: int, lost: str, shapes: str) -> Cause:
    """Return the loss of a node, and the resize that followed."""
    resize = Resize(
        generation=generation, left=(lost,), joined=(), shapes=shapes, mesh="", hosts=("node0",)
    )
    return Cause(
        rank=None, description=f"{lost} was lost", raised=None, ran_s=None,
        at_ns=time.monotonic_ns(), is_failure=False, resize=resize,
    )  # fmt: skip


def met(*causes: Cause) -> Met:
    """Return the event that all nodes have joined."""
    return Met(
        node_rank=0, hosts=("node0",), nproc_per_node=(1,), run_id="j", store_address="node0",
        store_port=1, own_address="node0", at_ns=1, causes=tuple({} for _ in causes),
    )  # fmt: skip


@pytest.mark.parametrize("has_run", [False, True])
def test_every_change_is_reported_once(has_run: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Once its ranks run, or once the next change follows, if that is earlier."""
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    request = build_request(Options({}, {}, {}), Program(kind="script", target="train.py"))
    watch = StartProgress(build_plan(request, facts), Console())
    first, second = change(1, "node1", "dp 3 -> 2"), change(2, "node2", "dp 2 -> 1")
    state = State(shutdown_timeout_s=1.0, ranks=READY, nodes=NodesState(phase=NodesPhase.RUNNING))
    watch.see(met(), state)
    state = replace(state, ranks=NOT_YET, causes=(first,))
    watch.see(met(first), state)
    if has_run:
        watch.see(TimePassed(at_ns=1), replace(state, ranks=READY))
    state = replace(state, ranks=NOT_YET, causes=(first, second))
    watch.see(met(first, second), state)
    watch.see(TimePassed(at_ns=1), replace(state, ranks=READY))
    lines = capfd.readouterr().err.splitlines()

    how = "runs" if has_run else "started"
    assert lines[0].startswith(f"meshrun: generation 1 {how} without node1: dp 3 -> 2")
    assert lines[1].startswith("meshrun: generation 2 runs without node2: dp 2 -> 1; it took ")
    assert len(lines) == 2


@pytest.mark.parametrize("node_rank", [0, 1])
def test_spare_workers_are_reported_once_nodes_have_met(
    node_rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """By node 0 alone, and again if their number changes."""
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    values = {"nnodes": "2", "nproc_per_node": "3", "mesh": "dp=-1,tp=2", "device": "cpu",
              "rdzv_endpoint": "node0:1"}  # fmt: skip
    request = build_request(Options(values, {}, {}), Program(kind="script", target="train.py"))
    plan = build_plan(request, facts)
    watch = StartProgress(plan, Console())
    state = State(shutdown_timeout_s=1.0, ranks=NOT_YET, nodes=NodesState())
    watch.see(LaunchBegan(at_ns=1), state)
    for workers in ((2, 3), (2, 3), (2, 2), (3, 4)):
        settled = complete_plan(plan, node_rank=node_rank, nproc_per_node=workers)
        watch.replan(settled)
        watch.see(met(), replace(state, nodes=NodesState(phase=NodesPhase.RUNNING)))
    lines = [line for line in capfd.readouterr().err.splitlines() if "spare" in line]

    of_five, of_seven = (f"meshrun: 1 of {n} workers is spare: node 1 has 1" for n in (5, 7))
    assert lines == ([] if node_rank else [of_five, of_seven])
