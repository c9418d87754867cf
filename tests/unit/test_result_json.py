"""A report as JSON and back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshrun.api.launch import read_result
from meshrun.protocol.result import LaunchResult, Resize, Timings
from meshrun.report.result_json import parse_result_json, render_result_json


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


def test_a_launcher_whose_exit_code_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGCHLD is ignored, it is always 0, which does not mean success."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    result = read_result(str(tmp_path), 0, began_ns=0)

    assert result.trouble is not None
    assert "SIGCHLD is ignored" in result.trouble.message
    assert result.exit_code == 71
