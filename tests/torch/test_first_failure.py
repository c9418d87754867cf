"""The report names the right cause, even if errors of peers arrive first.

``MESHRUN_REPEATS=20`` repeats each case 20 times, ``MESHRUN_LOAD=2`` runs two busy processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import LEFT_TOO_EARLY, LOST_PEER, PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
REPEATS = int(os.environ.get("MESHRUN_REPEATS", "1"))
LOAD = int(os.environ.get("MESHRUN_LOAD", "0"))
GUILTY, NAME = 2, "rank 2 [dp1 tp0]"
FAILING = PROGRAMS / "failing.py"
CGROUPS = Path("/sys/fs/cgroup/memory")
MERGED = re.compile(
    r"meshrun: (?:rank (\d)|(\d+) ranks) "
    rf"({LOST_PEER} as a consequence|stopped as requested)"
)


@dataclass(frozen=True)
class Case:
    """A way to fail, and the expected report."""

    way: str
    code: int
    message: str
    """The text after the rank's name in the error; ``*`` is any text."""
    at: str = ""
    """A part of the line of the program that the report names as the place."""
    stack: bool = False

    def __str__(self) -> str:
        return self.way


NAN = "raised ValueError: the loss is nan, exit code 1"
KILLED = "(killed from outside; the kernel logged no out-of-memory kill)"
CASES = [
    Case("first-thing", 1, NAN, "# the first thing"),
    Case("raise", 1, NAN, "# between"),
    Case("inside", 1, "raised *MAX on complex tensors, exit code 1", "op=dist.ReduceOp.MAX"),
    Case("own-words", 1, "raised RuntimeError: Connection closed by peer, exit code 1", '("Conn'),
    Case("no-space", 1, "raised RuntimeError: *, exit code 1", '"/dev/full"'),
    Case("rlimit", 1, "raised MemoryError, exit code 1", "bytearray(1 << 32)"),
    Case("rlimit-torch", 1, "raised RuntimeError: *can't allocate memory*", "ones(1 << 30)"),
    Case(
        "worker",
        1,
        "raised ValueError: sample 0 is corrupt, in DataLoader worker process 0, exit code 1",
        'ValueError("sample',
    ),
    Case(
        "worker-killed",
        1,
        "raised RuntimeError: DataLoader worker *Killed, exit code 1",
        "in DataLoader(",
    ),
    Case("exit", 3, "exited with code 3"),
    Case("text", 1, "exited with code 1: the data set is not there"),
    Case("leave", 1, LEFT_TOO_EARLY),
    Case("leave-at-once", 1, LEFT_TOO_EARLY),
    Case("SIGKILL", 137, f"was killed by SIGKILL {KILLED}"),
    Case("SIGTERM", 143, "was killed by SIGTERM (not sent by meshrun)"),
    Case("SIGUSR1", 138, "was killed by SIGUSR1"),
    Case("segfault", 139, "was killed by SIGSEGV (a crash in native code)", "string_at(0)", True),
    Case("abort", 134, "was killed by SIGABRT (*)", "(None).abort()", True),
]
ORDINARY = ("inside", "segfault")


@pytest.fixture(scope="module", autouse=True)
def load() -> Iterator[None]:
    """Run ``MESHRUN_LOAD`` busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.parametrize("case", ordinary(CASES, *ORDINARY), ids=lambda case: case.way)
@pytest.mark.parametrize("repeat", range(REPEATS))
def test_the_first_rank_to_fail_is_named(repeat: int, case: Case, tmp_path: Path) -> None:
    """With cause, exit code and place, and the other ranks merged; in the JSON report too."""
    check(case, tmp_path)


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_lack_of_memory_is_named(repeat: int, tmp_path: Path) -> None:
    """From the kernel's counters, if the launch is in a cgroup with a limit."""
    group = CGROUPS / f"meshrun_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"cannot create a memory cgroup here: {error}")
    message = (
        "was killed by SIGKILL (out of memory: the kernel killed 1 process at this job's limit"
        " of 1.0 GiB)"
    )
    try:
        check(
            Case("memory", 137, message),
            tmp_path,
            "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh",
        )  # fmt: skip
    finally:
        group.rmdir()


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_full_shared_memory_is_named(repeat: int, tmp_path: Path) -> None:
    """A write to a mapped file then raises SIGBUS."""
    small = "mount -t tmpfs -o size=2m none /dev/shm && head -c 2m /dev/zero > /dev/shm/full"
    words = ("unshare", "--mount", "sh", "-c")
    if shutil.which("unshare") is None or subprocess.run([*words, small], check=False).returncode:
        pytest.skip("cannot mount a separate /dev/shm here")
    message = "was killed by SIGBUS (/dev/shm is full: 2 MiB)"
    check(
        Case("bus", 135, message, "mmap.mmap(", True),
        tmp_path,
        *words, f'{small}; exec "$@"', "sh",
    )  # fmt: skip


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_ranks_that_fail_alike_at_once_are_merged(repeat: int, tmp_path: Path) -> None:
    """Only the first is reported as the cause."""
    report = tmp_path / "report.json"
    ours = launch(report, "all", "alike")
    result = json.loads(report.read_text())
    first, *others = result["failures"]

    assert ours.returncode == result["exit_code"] == 1
    assert ours.stderr.count("Traceback (most recent call last):") == 1
    assert first["raised"]["kind"] == "AssertionError"
    own = [one["at_ns"] for one in others if one["raised"] and not one["is_consequence"]]
    assert [at_ns for at_ns in own if at_ns < first["at_ns"]] == []
    cause = ours.stderr.splitlines()[-2]
    assert cause.startswith(f"error: rank {first['rank']} [")
    assert cause.endswith("] raised AssertionError: the loss is nan, exit code 1")


def check(case: Case, folder: Path, *around: str) -> None:
    """Have one of four ranks fail, and compare both forms of the report with the case."""
    report = folder / "report.json"
    ours = launch(report, str(GUILTY), case.way, around=around)
    result = json.loads(report.read_text())
    first, *others = result["failures"]
    *before, cause, where = ours.stderr.splitlines()
    expected = re.escape(f"error: {NAME} {case.message}").replace(r"\*", ".*")

    assert re.fullmatch(expected, cause), ours.stderr
    assert (ours.returncode, result["exit_code"]) == (case.code, case.code), ours.stderr
    assert (first["rank"], first["coordinate"], first["label"]) == (GUILTY, [1, 0], "dp1 tp0")
    assert not first["is_consequence"]
    assert all(other["is_consequence"] for other in others), others
    assert sorted(other["rank"] for other in others) == [0, 1, 3]
    merged = sum(int(count or 1) for _, count, _ in MERGED.findall("\n".join(before[1:])))
    assert merged + ("lost a connection" in before[0]) == 3, ours.stderr  # each is named once
    raised = first["raised"] or {"traceback": ""}
    assert ours.stderr.count("Traceback (most") == raised["traceback"].count("Traceback (most")
    assert place_of(case) in first["place"], first["place"]
    assert bool(case.at) == bool(first["place"])
    assert where.startswith(f"       {first['place']}{', ' if first['place'] else ''}on ")
    assert bool(first["stack"]) == case.stack, first
    if case.stack:
        assert f"{NAME}, Python stack at the crash:" in before


def place_of(case: Case) -> str:
    """Return the line that fails, such as ``failing.py:41``."""
    if not case.at:
        return ""
    lines = enumerate(FAILING.read_text().splitlines(), 1)
    (number,) = (number for number, line in lines if case.at in line)
    return f"{FAILING.name}:{number}"


def launch(
    report: Path, who: str, way: str, around: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run four ranks to the end."""
    words = ("--mesh", "dp=2,tp=2", "--device", "cpu", "--report", report, FAILING, who, way)
    return run_meshrun(*words, around=around)


@pytest.mark.parametrize(
    ("how", "leaving"),
    [
        ("popen", "C's exit"),
        *(
            pytest.param(how, leaving, marks=pytest.mark.nightly)
            for how, leaving in (
                ("fork", "_exit"), ("twice", "exit"), ("popen", "exit"), ("popen", "_exit"),
                ("loader", "exit"),
                ("fork", "destroy"), ("fork", "C's exit"), ("popen", "full exit"),
            )
        ),
    ],
)  # fmt: skip
def test_a_rank_that_left_early_is_noticed_whatever_it_left_behind(
    how: str, leaving: str, tmp_path: Path
) -> None:
    """A process that inherits its descriptors keeps no connection open; it lives until the end."""
    words = ("--nproc-per-node", "2", PROGRAMS / "left_behind.py", tmp_path, how, leaving)
    ours = run_meshrun(*words, env={"MESHRUN_FULL_EXIT": str(int(leaving == "full exit"))})

    assert ours.returncode == 1, ours.stderr
    assert f"error: rank 0 {LEFT_TOO_EARLY}\n" in ours.stderr
    assert (tmp_path / "answer").exists() == (how != "loader")
