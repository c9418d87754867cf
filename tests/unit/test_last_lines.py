"""The last lines of a rank's stderr, which explain its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshrun.console.console import Console
from meshrun.console.output import Output
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.reactor import Reactor
from meshrun.plan.log_files import RankFiles, StreamFile
from meshrun.plan.plan import build_plan
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest


@pytest.mark.parametrize("to_file", [False, True], ids=["pipe", "file"])
@pytest.mark.parametrize("printed", [False, True])
def test_what_a_rank_has_just_written_is_read(to_file: bool, printed: bool, tmp_path: Path) -> None:
    """A launcher that is busy may learn of a rank's end before it has read why.

    Of a file that is far ahead of a slow reader of our own output, only the end is.
    """
    plan = build_plan(
        LaunchRequest(program=Program(kind="script", target="train.py"), nproc_per_node=1),
        UNKNOWN_HOST,
    )
    path = str(tmp_path / "stderr.log") if to_file else None
    files = RankFiles(
        stdout=StreamFile(path=None, printed=False),
        stderr=StreamFile(path=path, printed=printed),
        error_file="",
    )
    unread, printed_to = os.pipe()
    os.set_blocking(printed_to, False)
    with Reactor() as reactor:
        console = Console(printed_to, printed_to)
        output = Output(plan, console, reactor, lambda _: None, os.open)
        ends = output.open(plan.rank(0), files)
        os.write(ends[1], b"a line\n" * (10 if path is None else 1 << 20))
        os.write(ends[1], b"  what():  CUDA error\n")

        assert output.last_lines(0)[-1:] == ["  what():  CUDA error"]
        assert sum(each.queued_bytes for each in console.waiting) < 1 << 20
        for end in (*ends, unread, printed_to):
            os.close(end)
        output.close()
