"""The number of ranks in the note that a signal stops them."""

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
from meshrun.protocol.rank_end import RankExited
from meshrun.report.progress import StartProgress

EXITED = RankExited(rank=1, pid=8, wait_status=0, at_ns=1)


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        ([RankState()], "no rank was started"),
        ([RankState(pid=8, exited=EXITED)], "all ranks have exited"),
        ([RankState(pid=7), RankState(pid=8)], "stopping 2 ranks, up to 1 s"),
        ([RankState(pid=7), RankState()], "stopping 2 ranks, up to 1 s"),
        ([RankState(pid=7), RankState(pid=8, exited=EXITED)], "stopping 1 rank, up to 1 s"),
    ],
    ids=["before the first", "after the last", "all", "one not reported yet", "one exited"],
)
def test_how_many_ranks_a_signal_stops(
    capfd: pytest.CaptureFixture[str], ranks: list[RankState], note: str
) -> None:
    """Ranks are forked together, and reported one after the other."""
    program = Program(kind="script", target="train.py")
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    plan = build_plan(build_request(Options({}, {}, {}), program), facts)
    state = State(shutdown_timeout_s=1.0, ranks=dict(enumerate(ranks)), stop=Stop.ASKED)
    StartProgress(plan, Console()).see(SignalArrived(signum=15, at_ns=1), state)

    assert capfd.readouterr().err.splitlines() == [f"meshrun: SIGTERM: {note}"]
