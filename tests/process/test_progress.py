"""progress(step): how far each generation got, and how that affects restarts."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun, start_meshrun, wait_until

STEPS = PROGRAMS / "steps.py"


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_the_report_says_how_far_each_generation_got(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """Including the last step before an exception, even right after the one before it."""
    report = tmp_path / "report.json"
    words = ("--nproc-per-node", "2", "--max-restarts", "3", "--start-method", method)
    ours = run_meshrun(*words, "--report", report, STEPS, "1-500:raise", ":3", "400-900:end")

    assert ours.returncode == 0, ours.stderr
    assert json.loads(report.read_text())["best_steps"] == [500, None, 900]


def test_progress_is_optional(fake_torch: object, tmp_path: Path) -> None:
    """The report has null for a generation without it."""
    report = tmp_path / "report.json"
    ours = run_meshrun("--report", report, STEPS, ":end")

    assert ours.returncode == 0, ours.stderr
    assert json.loads(report.read_text())["best_steps"] == [None]


def test_a_program_that_gets_no_further_is_given_up(fake_torch: object, tmp_path: Path) -> None:
    """After three failures in a row at the same step and place; the error gives the reason."""
    report = tmp_path / "report.json"
    words = ("--nproc-per-node", "2", "--max-restarts", "9", "--report", report)
    ours = run_meshrun(*words, STEPS, "1-10:nan", "5-20:nan", "15-20:nan")
    result = json.loads(report.read_text())
    place = result["failures"][0]["place"]
    why_not = f"3 failures in a row at step 20: ValueError ({place})"

    assert ours.returncode == 1
    assert str(STEPS.name) in place
    assert ours.stderr.endswith(f"\n       not restarted: {why_not}\n")
    assert result["no_restart"] == why_not
    assert (result["restarts"], result["best_steps"]) == (3, [10, 20, 20, 20])


def test_waits_grow_until_a_start_gets_further(fake_torch: object) -> None:
    """The message gives the reason; after progress, the restart follows at once."""
    words = ("--max-restarts", "4", STEPS)
    ours = run_meshrun(*words, "1-9:3", ":SIGKILL", "1-8:4", "7-12:nan", ":end")
    restarts = [line for line in ours.stderr.splitlines() if line.startswith("meshrun: restart")]

    assert ours.returncode == 0
    assert restarts == [
        "meshrun: restart 1 of 4, because rank 0 exited with code 3",
        "meshrun: restart 2 of 4, because rank 0 was killed by SIGKILL",
        "meshrun: restart 3 of 4 in 1 s, because rank 0 exited with code 4;"
        " none of the last 2 starts got past step 9",
        "meshrun: restart 4 of 4, because rank 0 raised ValueError: nan",
    ]


def test_a_signal_ends_the_wait_for_a_restart(fake_torch: object, tmp_path: Path) -> None:
    """Otherwise, there would be another start after 2 s."""
    with start_meshrun("--max-restarts", "9", STEPS, ":3", folder=tmp_path) as running:
        wait_until(lambda: "restart 3 of 9 in 2 s" in running.stderr, lambda: running.stderr)
        running.signal(signal.SIGTERM)
        code = running.wait()

    assert code == 143
    assert running.stdout.count("up") == 3
    assert running.stderr.endswith("\nmeshrun: stopped by SIGTERM\n")


@pytest.mark.nightly
def test_hangs_that_get_no_further_are_given_up(fake_torch: object, tmp_path: Path) -> None:
    """A hang counts like any other failure, and its report gives the reason too."""
    program = tmp_path / "program.py"
    program.write_text("import time\nfrom meshrun import progress\nprogress(7)\ntime.sleep(1000)\n")
    ours = run_meshrun("--max-restarts", "9", "--hang-timeout", "1.5", program)

    assert ours.returncode == 124
    assert "restart 2 of 9" in ours.stderr
    assert "restart 3 of 9" not in ours.stderr
    assert "       not restarted: 3 failures in a row at step 7: no rank made" in ours.stderr
