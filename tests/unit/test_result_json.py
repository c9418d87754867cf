"""A report as JSON and back."""

from __future__ import annotations

import copy
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshrun.api.group_cells import CellFailed
from meshrun.api.launch import read_result
from meshrun.api.worker_group import GroupLost
from meshrun.errors import MeshError, MeshrunError, ProgramError, SpecError
from meshrun.protocol.result import LaunchResult, RankFailed, RankFailure, Resize, Timings
from meshrun.report.result_json import leave_report, parse_result_json, render_result_json
from meshrun.report.result_text import render_failure


def test_changes_of_nodes_are_parsed_as_they_were_rendered() -> None:
    resize = Resize(
        generation=2,
        left=("node1",),
        joined=("node3", "node4"),
        shapes="dp 2 -> 3",
        mesh="dp=3,tp=2",
        hosts=("node0", "node3", "node4"),
    )
    result = LaunchResult(
        exit_code=0,
        signum=None,
        failures=(),
        broken_program=None,
        trouble=None,
        timings=Timings(began_ns=1),
        resizes=(resize,),
    )

    assert parse_result_json(render_result_json(result)) == result


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (-9, "was killed by SIGKILL"),
        (-15, "was killed by SIGTERM"),
        (1, "exited with code 1"),
        (255, "exited with code 255"),
    ],
)
def test_a_launcher_that_reports_nothing(tmp_path: Path, code: int, end: str) -> None:
    """How it ended is the error."""
    result = read_result(str(tmp_path), code, began_ns=0)
    assert result.trouble is not None
    assert result.trouble.message == f"the launcher {end} before it could report a result"
    assert result.exit_code == (code if code > 0 else 128 - code)

    result = read_result(gone := str(tmp_path / "gone"), code, began_ns=0)
    assert result.trouble is not None
    assert result.trouble.message == (
        f"the launcher {end} without a result: its temporary folder `{gone}` was removed during the"
        " launch"
    )


def test_a_launch_keeps_its_code_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If it failed, or if the report is not the user's."""
    result = LaunchResult(exit_code=0, signum=None, timings=Timings(began_ns=1))
    leave_report(result, path := str(tmp_path / f"meshrun_{0:016x}" / "report.json"))

    why = "No such file or directory"
    assert capsys.readouterr().err == f"meshrun: cannot write `{path}`: {why}\n"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        leave_report(replace(result, exit_code=3), "-")
        # Nothing is left in its buffer that would be written, and fail, at the end.


def test_a_launcher_whose_exit_code_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGCHLD is ignored, it is always 0, which does not mean success."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    result = read_result(str(tmp_path), 0, began_ns=0)

    assert result.trouble is not None
    assert "SIGCHLD is ignored" in result.trouble.message
    assert result.exit_code == 71


@pytest.mark.parametrize(
    "error",
    [
        RankFailed(LaunchResult(exit_code=3, timings=Timings(began_ns=1))),
        SpecError("`x` is not a size", "dp=x", 3, hint="use a number", option="--mesh"),
        ProgramError("can't open file", exit_code=2, hint="check the path"),
        CellFailed("its traceback", ValueError("x")),
        GroupLost("these workers were closed", hint="start a new group"),
        MeshError("no mesh"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copied", "pickled"],
)
def test_an_error_can_be_copied(
    error: MeshrunError, make_copy: Callable[[MeshrunError], MeshrunError]
) -> None:
    """As a pool of processes does with what a task raises."""
    made = make_copy(error)
    assert type(made) is type(error)
    assert str(made) == str(error)
    assert repr(vars(made)) == repr(vars(error))


def test_ranks_that_ended_in_the_same_way_share_a_line() -> None:
    """With the verb of several."""
    first, *others = [
        RankFailure(
            rank=rank, coordinate=(), label="", host="a", pid=rank, exit_code=None,
            signum=signal.SIGKILL, at_ns=rank, raised=None, asked_to_end=False, why="out of memory",
        )
        for rank in range(3)
    ]  # fmt: skip
    result = LaunchResult(
        exit_code=137, signum=None, failures=(first, *others), broken_program=None, trouble=None,
        timings=Timings(began_ns=0),
    )  # fmt: skip

    assert render_failure(result).splitlines() == [
        "meshrun: 2 ranks were killed by SIGKILL (out of memory) (1, 2)",
        "",
        "error: rank 0 was killed by SIGKILL (out of memory)",
        "       on a, pid 0",
    ]
