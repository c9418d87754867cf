"""What people are told when a signal finds no rank to end."""

from __future__ import annotations

import pytest

from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.console.console import Console
from meshrun.host.machine import HostFacts
from meshrun.lifecycle.phases import Stop
from meshrun.lifecycle.state import State
from meshrun.plan.plan import build_plan
from meshrun.plan.rank_program import Program
from meshrun.protocol.events import SignalArrived
from meshrun.protocol.generation import RankState
from meshrun.report.progress import StartProgress


@pytest.mark.parametrize(
    ("pid", "told"),
    [
        (None, "meshrun: SIGTERM: no rank was started"),
        (7, "meshrun: SIGTERM: all ranks have exited"),
    ],
)
def test_whether_ranks_have_run(
    capfd: pytest.CaptureFixture[str], pid: int | None, told: str
) -> None:
    """Before the first has begun, and after the last has ended."""
    program = Program(kind="script", target="train.py")
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    plan = build_plan(build_request(Options({}, {}, {}), program), facts)
    state = State(shutdown_timeout_s=1.0, ranks={0: RankState(pid=pid)}, stop=Stop.ASKED)
    StartProgress(plan)(SignalArrived(signum=15, at_ns=1), state, Console())

    assert capfd.readouterr().err.splitlines() == [told]
