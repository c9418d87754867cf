"""Training that is killed continues from its checkpoint on another mesh: examples/resume.py."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit import MARK, ROOT, Running, marked_processes, run_meshrun, start_meshrun, wait_until

pytestmark = pytest.mark.torch
RESUME = ROOT / "examples" / "resume.py"
FOR_EVER = str(10**9)
TOLERANCE = 1e-5
"""Relative tolerance of a loss. With another number of ranks, the sums over a batch have another
order, so float32 rounds them differently, by 6e-8 each time: measured, 5e-7 at most after 200
steps. The batch of another step, or an optimizer that starts from zero, changes a loss by 0.4."""
_DRIFTED = 2e-2
"""The same after 800 steps, when the optimizer starts to amplify such differences: without any
fault, runs with 1 and 4 ranks differ by 7e-7 at most until then, and by 2e-3 at step 1200."""

Curve = list[tuple[int, float]]


def tolerance(step: int) -> float:
    """Return how much a loss may differ from a run with another number of ranks."""
    return TOLERANCE if step <= 800 else _DRIFTED


def curve(printed: str) -> Curve:
    """Return the steps and losses of complete lines."""
    return [(int(n), float(x)) for n, x in re.findall(r"step (\d+): loss ([\d.]+)\n", printed)]


def starts(printed: str) -> list[int]:
    """Return the step from which each start continued."""
    return [int(n) for n in re.findall(r"from step (\d+) on", printed)]


def words(dp: int, *more: str | Path) -> list[str | Path]:
    return ["--mesh", f"dp={dp}", "--device", "cpu", "--no-prefix", *more]


def run_until(
    dp: int, checkpoints: Path, folder: Path, end: Callable[[Running], None], *options: str
) -> tuple[int, str]:
    """Launch, call ``end``, wait until nothing is left; return the exit code and the output."""
    folder.mkdir()
    with start_meshrun(
        *words(dp, *options, RESUME, checkpoints, FOR_EVER), folder=folder
    ) as running:
        end(running)
        code = running.wait()
    wait_until(lambda: not marked_processes(os.environ[MARK]), lambda: "old ranks to end")
    return code, running.stdout


def wait_for_steps(running: Running, count: int) -> None:
    """Wait until ``count`` steps have been printed."""
    wait_until(lambda: len(curve(running.stdout)) >= count, lambda: running.stdout + running.stderr)


def finish(dp: int, checkpoints: Path, last: int) -> str:
    """Launch up to step ``last`` without faults; return the output."""
    ours = run_meshrun(*words(dp, RESUME, checkpoints, str(last)))
    assert (ours.returncode, ours.stderr) == (0, "")
    return ours.stdout


@pytest.mark.nightly
def test_the_loss_continues_where_it_was(tmp_path: Path) -> None:
    """On 4 ranks, then 2, then 4, each killed by SIGKILL: every step has the undisturbed loss."""
    checkpoints = tmp_path / "checkpoints"

    def kill_a_rank_then_all(running: Running) -> None:
        wait_for_steps(running, 15)
        os.kill(running.below_zygote()[-1], signal.SIGKILL)
        running.wait_for("from step ", 2)
        wait_for_steps(running, len(curve(running.stdout)) + 15)
        running.signal(signal.SIGKILL)

    def kill_all(running: Running) -> None:
        wait_for_steps(running, 15)
        running.signal(signal.SIGKILL)

    _, four = run_until(
        4, checkpoints, tmp_path / "four", kill_a_rank_then_all, "--max-restarts", "1"
    )
    cut_off = checkpoints / f"{FOR_EVER}.unfinished"
    cut_off.mkdir()
    (cut_off / ".metadata").write_text("half of it")
    _, two = run_until(2, checkpoints, tmp_path / "two", kill_all)
    last = max(step for step, _ in curve(two)) + 10
    again = finish(4, checkpoints, last)
    undisturbed = dict(curve(finish(4, tmp_path / "undisturbed", last)))

    begun = starts(four + two + again)
    assert len(begun) == 4
    assert begun[0] == 0
    assert [step > 0 and step % 10 == 0 for step in begun[1:]] == [True, True, True]
    assert begun == sorted(set(begun))
    assert not cut_off.exists()
    killed = curve(four) + curve(two) + curve(again)
    assert {step for step, _ in killed} == set(range(1, last + 1))
    assert [loss for _, loss in killed] == pytest.approx(
        [undisturbed[step] for step, _ in killed], rel=TOLERANCE
    )


@pytest.mark.nightly
def test_sigterm_loses_no_step(tmp_path: Path) -> None:
    """The current step is saved, and the launch counts as preempted."""
    checkpoints = tmp_path / "checkpoints"

    def preempt(running: Running) -> None:
        wait_for_steps(running, 12)
        running.signal(signal.SIGTERM)

    code, printed = run_until(2, checkpoints, tmp_path / "two", preempt)
    last = curve(printed)[-1][0]
    rest = finish(1, checkpoints, last + 1)

    assert code == 75
    assert [step for step, _ in curve(rest)] == [last + 1]
    assert starts(rest) == [last]
    assert len([path for path in checkpoints.iterdir() if path.name.isdecimal()]) == 2
