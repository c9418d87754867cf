"""Launches that --per-task refuses."""

from __future__ import annotations

import pytest

from tests.kit import PROGRAMS, run_meshrun
from tests.schedulers import DSTACK, MPI, STEP

ECHO = str(PROGRAMS / "echo.py")


@pytest.mark.parametrize(
    ("env", "words", "error"),
    [
        ({}, (), "--per-task requires a scheduler that starts a process per rank, found no"),
        (DSTACK, (), "starts a process per rank, found dstack, node 1 of 2"),
        (STEP, ("--max-restarts", "1"), "--per-task cannot be used with --max-restarts"),
        (STEP, ("--no-python",), "--per-task cannot be used with --no-python"),
        (MPI, ("--nnodes", "3"), ""),
    ],
)
def test_what_is_refused(env: dict[str, str], words: tuple[str, ...], error: str) -> None:
    """Nothing starts; of tasks that find the same error, only the first reports it."""
    done = run_meshrun("--per-task", "--mesh", "dp=4", "--device", "cpu", *words, ECHO, env=env)

    assert done.returncode == 2
    assert error in done.stderr
    assert bool(done.stderr) == bool(error)
    assert done.stdout == ""
