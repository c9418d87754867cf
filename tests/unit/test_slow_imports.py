"""Imports that take long, as from a slow file system, are noted with how to look into them."""

from __future__ import annotations

import pytest

from meshrun.cli.options import Options
from meshrun.cli.read import build_request
from meshrun.console.console import Console
from meshrun.host.machine import HostFacts
from meshrun.host.reactor import Reactor
from meshrun.lifecycle.phases import Phase
from meshrun.lifecycle.state import State
from meshrun.plan.plan import build_plan
from meshrun.plan.rank_program import Program
from meshrun.report import progress


def test_imports_that_take_long_are_noted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while they do; with the modules that are preloaded."""
    monkeypatch.setattr(progress, "_IMPORT_TAKES_S", 0.0)
    options = Options({"preload": ["slow"]}, {}, {})
    facts = HostFacts(hostname="h", usable_cores=4, accelerator=None, accelerator_count=0)
    plan = build_plan(build_request(options, Program(kind="script", target="train.py")), facts)
    for phase in (Phase.IMPORTING, Phase.RUNNING):
        watch = progress.StartProgress(plan, Console())
        with Reactor() as reactor:
            watch.begin(reactor, State(shutdown_timeout_s=1.0, ranks={}, phase=phase))
            reactor.turn(most_s=0)

    assert capfd.readouterr().err == (
        "meshrun: importing torch and slow has taken 0 s; Ctrl-\\ shows where it is\n"
    )
