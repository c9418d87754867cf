"""Processes that the kernel holds cannot be killed, and are reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.console.console import Console
from meshrun.host.machine import HostFacts
from meshrun.lifecycle.state import State
from meshrun.plan.plan import build_plan
from meshrun.plan.rank_program import Program
from meshrun.protocol.from_zygote import LeftoversEnded
from meshrun.protocol.generation import RankState
from meshrun.report.progress import StartProgress

_HELD = """
import subprocess
from meshrun.host import processes

child = subprocess.Popen(["sleep", "600"])
processes._KILL_TAKES_S = 0.05
processes.send_signal = lambda pid, signum: None  # as if the kernel held it
ended = processes.end_children(grace_s=0.0)
child.kill()
child.wait()
print(ended.killed, ended.count, ended.survivors == (child.pid,))
"""


def test_what_survives_sigkill_is_returned() -> None:
    """After a limited wait."""
    ran = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True)

    assert ran.stdout == "0 1 True\n"


def test_survivors_are_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Even if a second event names one again."""
    program = Program(kind="script", target="train.py")
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    plan = build_plan(build_request(Options({}, {}, {}), program), facts)
    state = State(shutdown_timeout_s=1.0, ranks={0: RankState()})
    watch = StartProgress(plan, Console())
    watch.see(LeftoversEnded(count=2, survivors=[7, 5]), state)
    watch.see(LeftoversEnded(count=0, survivors=[5, 9]), state)
    lines = capfd.readouterr().err.splitlines()

    assert lines[0] == "meshrun: killed 2 processes that the ranks left behind"
    assert lines[1].startswith("meshrun: processes 5, 7 survived SIGKILL: ")
    assert lines[2].startswith("meshrun: process 9 survived SIGKILL")
    assert len(lines) == 3
