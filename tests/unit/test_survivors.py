"""Processes that the kernel holds: named, since they cannot be ended."""

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


def test_what_outlives_sigkill_is_returned() -> None:
    """The wait for it has an end."""
    told = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True)

    assert told.stdout == "0 1 True\n"


def test_survivors_are_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    """By the zygote, and by the launcher that got them from it."""
    program = Program(kind="script", target="train.py")
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    plan = build_plan(build_request(Options({}, {}, {}), program), facts)
    state = State(shutdown_timeout_s=1.0, ranks={0: RankState()})
    watch = StartProgress(plan, Console())
    watch.see(LeftoversEnded(count=2, survivors=[7, 5]), state)
    watch.see(LeftoversEnded(count=0, survivors=[5, 9]), state)
    told = capfd.readouterr().err.splitlines()

    assert told[0] == "meshrun: killed 2 processes that the ranks left behind"
    assert told[1].startswith("meshrun: processes 5, 7 survived SIGKILL: ")
    assert told[2].startswith("meshrun: process 9 survived SIGKILL")
    assert len(told) == 3
