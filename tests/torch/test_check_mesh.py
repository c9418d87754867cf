"""``--check`` with real ranks."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.kit import PROGRAMS, Running, run_meshrun, start_meshrun, wait_until

pytestmark = pytest.mark.torch
MESH = ("--check", "--mesh", "dp=2", "--device", "cpu")


def test_what_is_measured(tmp_path: Path) -> None:
    """Every operation on every dim, links and paths; an unmet requirement sets the exit code."""
    no_folder = tmp_path / "none"
    paths = ("--check-path", tmp_path, "--check-path", no_folder)
    done = run_meshrun(
        *MESH,
        "--require",
        "dp>=900GB/s",
        *paths,
        "--node-history",
        tmp_path / "history",
        "--format",
        "json",
        "quick",
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert {(row["dim"], row["op"]) for row in result["dims"]} == {
        ("dp", op) for op in ("all_reduce", "all_gather", "all_to_all")
    }
    assert {row["bytes"] for row in result["dims"]} == {1 << 10, 1 << 20, 1 << 22}
    assert [rank["exchanges"][0]["peer"] for rank in result["ranks"]] == [1, 0]
    assert all(rank["gflops"] > 0 for rank in result["ranks"])
    texts = [finding["text"] for finding in result["findings"]]
    assert texts[0].startswith("dp>=900GB/s is not met: the slowest group of dp has ")
    assert any(text.startswith(f"`{no_folder}` on ") for text in texts)
    (line,) = (tmp_path / "history").read_text().splitlines()
    assert json.loads(line)["reason"].startswith(f"--check found: `{no_folder}` on ")


def test_a_check_before_the_program(tmp_path: Path) -> None:
    """The program is neither started nor restarted if a requirement is not met."""
    history = tmp_path / "history"
    words = ("--mesh", "dp=2", "--device", "cpu", "--max-restarts", "2", "--node-history", history)
    program = PROGRAMS / "describe.py"
    needs = ("--require", "dp>=900GB/s", "--check-path", tmp_path / "none")
    done = run_meshrun("--check-first", *needs, *words, program)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    stderr = re.sub(r"[\d.]+ ([MG]B/)?s\b", "#", done.stderr)
    assert "meshrun: checked 2 ranks on 1 node in #; dp #\n" in stderr
    assert "meshrun: found: dp>=900GB/s is not met: " in stderr
    assert "error: --check-first did not start the program: dp>=900GB/s is not met: " in stderr
    assert "(and 1 more)" in stderr
    assert len(history.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("products", "ends"),
    [pytest.param(20, "fast", marks=pytest.mark.nightly), (10**9, "slow")],
)
def test_what_is_slow_by_chance_is_measured_again(tmp_path: Path, products: int, ends: str) -> None:
    """A rank that is disturbed during its first products does not count as slow."""
    (program := tmp_path / "disturbed.py").write_text(
        "import time\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "from meshrun.worker import check_ranks\n"
        "calls, multiply = [], torch.mm\n"
        "def disturbed(one, other):\n"
        "    calls.append(None)\n"
        f"    time.sleep(0.05 * (dist.get_rank() == 1 and len(calls) <= {products}))\n"
        "    return multiply(one, other)\n"
        "torch.mm = disturbed\n"
        "seconds = 2 * 512**3 / 1e9 / check_ranks._gflops(torch.device('cpu'), 'quick')\n"
        "print(dist.get_rank(), 'slow' if seconds > 0.05 else 'fast')\n"
    )
    done = run_meshrun("--mesh", "dp=2", "--device", "cpu", "--no-prefix", program)
    assert sorted(done.stdout.splitlines()) == ["0 fast", f"1 {ends}"], done.stderr


@pytest.mark.nightly
def test_a_back_end_that_does_nothing(tmp_path: Path) -> None:
    """It is not called fast: sums are checked first."""
    (tmp_path / "broken.py").write_text(
        "import torch.distributed as dist\ndist.all_reduce = lambda *_, **__: None\n"
    )
    done = run_meshrun(*MESH, "--preload", "broken", "quick", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "all_reduce over all ranks adds 2 ones up to 1: the backend of its group" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, 137), (signal.SIGINT, 130)])
def test_a_check_that_is_interrupted(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    """A rank ends in the same way as its check; Ctrl-C ends all, without a traceback."""
    with _checking(tmp_path) as (run, check):
        if signum == signal.SIGKILL:
            check.kill()
        else:
            run.signal(signum)
        assert run.wait() == code, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


@pytest.mark.nightly
def test_a_check_that_is_missed_by_another_rank_first(tmp_path: Path) -> None:
    """A rank that is asked to end before it has noticed the death of its check is the cause."""
    with _checking(tmp_path) as (run, check):
        check.parent().suspend()
        check.kill()
        assert run.wait() == 137, run.stderr
    assert "rank 1 [dp1] was killed by SIGKILL" in run.stderr


@contextmanager
def _checking(folder: Path) -> Iterator[tuple[Running, psutil.Process]]:
    """Provide a launch, and the fork in which its rank 1 has joined a check that does not end."""
    (folder / "waiting.py").write_text(
        "import os, pathlib, time\n"
        "from meshrun.worker import check_ranks\n"
        "measure = check_ranks.measure\n"
        "def wait(*arguments):\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        folder = pathlib.Path({str(folder)!r})\n"
        "        (folder / 'new').write_text(str(os.getpid()))\n"
        "        (folder / 'new').rename(folder / 'joined')\n"
        "        time.sleep(1000)\n"
        "    return measure(*arguments)\n"
        "check_ranks.measure = wait\n"
    )
    program = folder / "describe.py"
    program.write_text((PROGRAMS / "describe.py").read_text())
    words = ("--check-first", "--mesh", "dp=2", "--device", "cpu", "--preload", "waiting", program)
    with start_meshrun(*words, folder=folder) as run:
        wait_until((joined := folder / "joined").exists, lambda: run.stderr)
        yield run, psutil.Process(int(joined.read_text()))


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fork", "exec"])
def test_the_program_finds_no_trace_of_the_check(method: str) -> None:
    """No thread, group or variable; the program's own mesh works."""
    words = ("--mesh-init", "lazy", "--mesh", "dp=2", "--device", "cpu", "--start-method", method)
    program = PROGRAMS / "untouched.py"
    done = run_meshrun("--check-first", *words, program)
    assert done.returncode == 0, done.stderr
    assert "found nothing wrong" in done.stderr
    assert done.stdout.count("untouched") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*MESH, "train.py"), "--check runs no program, found `train.py`"),
        (("--check", "--nproc-per-node", "2"), "--check requires --mesh"),
        ((*MESH, "--require", "tp"), "cannot parse --require `tp`"),
        ((*MESH, "--require", "tp>=1GB/s", "quick"), "the mesh has no dim `tp`"),
        ((*MESH, "--check-first"), "--check-first cannot be used with --check"),
        ((*MESH, "--watch"), "--watch cannot be used with --check, which runs no program"),
        (("--check-first", "--mesh", "dp=2", "--no-python", "true"), "requires a Python program"),
        (("--check-path", "/tmp", "--mesh", "dp=2", "x.py"), "requires --check or --check-first"),
    ],
)
def test_invalid_checks_start_nothing(words: tuple[str, ...], message: str) -> None:
    done = run_meshrun(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "rank" not in done.stderr  # nothing was started
