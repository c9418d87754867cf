"""Debugs a failed test on a rank, as ``pytest --pdb`` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any

import pytest

from meshrun.layout.labels import rank_label
from meshrun.mesh.current_layout import current_layout


@contextmanager
def without_capture(config: pytest.Config) -> Iterator[None]:
    """Use this process's own standard streams while the block runs."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def debug_test(config: pytest.Config, report: pytest.TestReport, frames: TracebackType) -> bool:
    """Show a failure and debug it on standard streams; return whether the user quit."""
    from _pytest.config import create_terminal_writer

    to = create_terminal_writer(config, sys.stdout)
    to.line()
    for name, text in report.sections:
        to.sep(">", name)
        to.line(text.rstrip())
    to.sep(">", "traceback")
    report.toterminal(to)
    rank = int(os.environ["RANK"])
    to.sep(">", f"entering PDB on rank {rank} [{rank_label(current_layout(), rank)}]")
    module, name = config.getoption("usepdb_cls") or ("pdb", "Pdb")
    debugger = getattr(import_module(module), name)()
    config.hook.pytest_enter_pdb(config=config, pdb=debugger)
    debugger.reset()
    debugger.interaction(None, frames)
    config.hook.pytest_leave_pdb(config=config, pdb=debugger)
    return bool(debugger.quitting)
