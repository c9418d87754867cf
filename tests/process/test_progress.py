"""progress(step): how far each generation came, and what restarts make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun

STEPS = PROGRAMS / "steps.py"


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_the_report_says_how_far_each_generation_came(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """The last step before an exception is told, however close to the one before it."""
    report = tmp_path / "report.json"
    words = ("--nproc-per-node", "2", "--max-restarts", "3", "--start-method", method)
    ours = run_meshrun(*words, "--report", report, STEPS, "1-500:raise", ":3", "400-900:end")

    assert ours.returncode == 0, ours.stderr
    assert json.loads(report.read_text())["best_steps"] == [500, None, 900]


def test_nobody_has_to_say_how_far_it_came(fake_torch: object, tmp_path: Path) -> None:
    """The report has a null for the generation."""
    report = tmp_path / "report.json"
    ours = run_meshrun("--report", report, STEPS, ":end")

    assert ours.returncode == 0, ours.stderr
    assert json.loads(report.read_text())["best_steps"] == [None]
