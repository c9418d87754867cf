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
from meshrun.plan.plan import LaunchPlan, build_plan
from tests.plans import request_of


def _plan() -> LaunchPlan:
    return build_plan(
        request_of(nproc_per_node=1),
        UNKNOWN_HOST,
    )


@pytest.mark.parametrize("to_file", [False, True], ids=["pipe", "file"])
@pytest.mark.parametrize("printed", [False, True])
def test_what_a_rank_has_just_written_is_read(to_file: bool, printed: bool, tmp_path: Path) -> None:
    """A launcher that is busy may learn of a rank's end before it has read why.

    Of a file that is far ahead of a slow reader of our own output, only the end is.
    """
    plan = _plan()
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


def test_a_log_file_that_cannot_be_read_is_noted_once(tmp_path: Path) -> None:
    """As on a broken disk or network file system; the launch continues."""
    files = RankFiles(
        stdout=StreamFile(path=str(tmp_path / "stdout.log"), printed=True),
        stderr=StreamFile(path=str(tmp_path / "stderr.log"), printed=True),
        error_file="",
    )
    printed, printed_to = os.pipe()
    with Reactor() as reactor:
        output = Output(
            plan := _plan(),
            Console(printed_to, printed_to),
            reactor,
            lambda _: None,
            lambda path, flags: os.open(path, flags | os.O_WRONLY),
        )
        ends = output.open(plan.rank(0), files)
        for end in ends:
            os.write(end, b"a line\n")
            os.close(end)
        output.read_files()
        output.read_files()

        assert output.last_lines(0) == []
        assert output.finish(lambda: None) == 0
        output.close()
    note = (
        f"meshrun: cannot read {tmp_path}/stdout.log (Bad file descriptor), so what ranks write to"
        " log files may not be printed\n"
    )
    assert os.read(printed, 1 << 16) == note.encode()
    for end in (printed, printed_to):
        os.close(end)
