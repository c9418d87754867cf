"""Where the ranks are: stacks on SIGQUIT, after a slow start, and in a hang."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.kit import (
    NO_PROGRESS,
    PROGRAMS,
    ZYGOTE,
    Running,
    let_pass,
    run_meshrun,
    start_meshrun,
    wait_until,
)

WHERE = PROGRAMS / "where.py"
QUIT = signal.SIGQUIT


def ask(running: Running, *answers: str, times: int = 1) -> str:
    """Send SIGQUIT until stderr has all answers so many times, and return it.

    A rank that has printed `up` may not have got there yet, nor the launcher have seen it start.
    """
    while any(running.stderr.count(answer) < times for answer in answers):
        seen = running.stderr.count("    pid")
        running.signal(QUIT)
        wait_until(
            lambda seen=seen: running.stderr.count("    pid") > seen,
            lambda: running.stderr,
        )
    return running.stderr


def place_of(line: str) -> str:
    """Return where a line of the program is, as stacks show it."""
    number = WHERE.read_text().splitlines().index(line) + 1
    return f"{WHERE}:{number}".removeprefix(f"{os.getcwd()}/")


def test_equal_stacks_are_merged_and_the_launch_continues(
    fake_torch: object, tmp_path: Path
) -> None:
    """By coordinates, with the place in the user's code; the user's threads are shown too."""
    words = ("--mesh", "dp=2,tp=2", "--mesh-init", "lazy", WHERE, "rest=sleep", "3=thread")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 4)
        place = place_of("    time.sleep(1000)")
        beside = f"dp1 tp1: {place} in sleep_soundly (and 1 other thread)\n"
        stderr = ask(running, beside, f"rank 0-2 x3: {place} in sleep_soundly\n", times=2)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert stderr.count("meshrun: SIGQUIT: showing where the ranks are") >= 2
    assert f"    a thread: {place} in sleep_soundly\n" in stderr
    assert "meshrun/worker" not in stderr


def test_requests_do_not_harm_a_rank_whose_threads_run(fake_torch: object, tmp_path: Path) -> None:
    """Nothing follows the frames of a thread while it runs, or interrupts native code."""
    words = ("--nproc-per-node", "2", WHERE, "rest=busy")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        ask(running, "in wait_beside_a_busy_thread\n", times=20)
        stderr = ask(running, "    a thread: ")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert "failed" not in stderr


def test_the_main_thread_of_a_rank_in_native_code_is_shown(
    fake_torch: object, tmp_path: Path
) -> None:
    """Even if that holds the interpreter's lock, so that no thread can answer."""
    words = ("--nproc-per-node", "2", WHERE, "rest=locked")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        place = place_of("    ctypes.PyDLL(None).read(reads, ctypes.create_string_buffer(1), 1)")
        ask(running, f"all x2: {place} in keep_the_lock\n")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_ps_shows_which_process_is_which(fake_torch: object, tmp_path: Path, method: str) -> None:
    """Titles name rank and coordinate, and stacks the process ids; sys.argv is unchanged."""
    program = tmp_path / "say.py"
    program.write_text(
        "import signal, sys\n"
        "print('up', sys.argv[1:], flush=True)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    words = ("--mesh", "dp=2,tp=2", "--mesh-init", "lazy", "--start-method", method, program, "a b")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up ['a b']", 4)
        below = running.below_zygote()
        titles = [title_of(pid) for pid in (running.process.pid, running.zygote(), *below)]
        stderr = ask(running, "all x4: ")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert titles == [
        f"meshrun launcher --mesh dp=2,tp=2 --mesh-init lazy --start-method {method} {program} a b",
        f"meshrun zygote {program} a b",
        "meshrun store",
        *(f"meshrun rank {rank} [dp{rank // 2} tp{rank % 2}] {program} a b" for rank in range(4)),
    ]
    (named,) = re.findall("all x4: [^\n]+\n(?:    .+\n)*?    pids ([0-9-,]+)", stderr)
    assert numbers_in(named) == below[1:]


def title_of(pid: int) -> str:
    """Return the single argument that ``ps`` and psutil show for a process."""
    shown = Path(f"/proc/{pid}/cmdline").read_text()
    assert shown.count("\0") == 1, shown
    return shown.removesuffix("\0")


def numbers_in(text: str) -> list[int]:
    """Parse ``4-6,9``."""
    ends = [part.split("-") for part in text.split(",")]
    return [pid for part in ends for pid in range(int(part[0]), int(part[-1]) + 1)]


def test_ranks_that_cannot_answer_are_named(fake_torch: object, tmp_path: Path) -> None:
    """Asking does not kill a stopped rank, and the others do not wait for it."""
    words = ("--nproc-per-node", "4", WHERE, "0=stop", "1=closed", "3=exec", "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 4)
        stopped = running.below_zygote()[1]
        wait_until(
            lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T",
            lambda: "rank 0 is not stopped",
        )
        ask(running, "rank 1,3 x2: wrote no stack: it runs another program, ", "rank 2: ")
        wait_until(
            lambda: "rank 0: is suspended (SIGCONT resumes it)" in running.stderr,
            lambda: running.stderr,
        )
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


def test_a_command_is_left_alone(tmp_path: Path) -> None:
    """The signal would kill it."""
    words = ("--no-python", "--nproc-per-node", "2", "sh", "-c", "echo up; exec sleep 600")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        ask(running, "all x2: is not running Python started by meshrun, or has not started it yet")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


def test_ranks_started_by_exec_answer_too(fake_torch: object, tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--start-method", "exec", WHERE, "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        assert "in sleep_soundly" in ask(running, "all x2: ")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


def test_sigquit_ends_a_launch_with_signals_to_handle(fake_torch: object, tmp_path: Path) -> None:
    """As in torchrun."""
    words = ("--signals-to-handle", "SIGQUIT", "--nproc-per-node", "2", WHERE, "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        running.signal(QUIT)
        assert running.wait() == 128 + QUIT
    assert "where the ranks are" not in running.stderr


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not on the PATH")
def test_native_stacks_follow_if_py_spy_is_installed(fake_torch: object, tmp_path: Path) -> None:
    """For each rank; the launch continues."""
    words = ("--nproc-per-node", "2", WHERE, "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        pids = running.below_zygote()[1:]
        ask(running, "all x2: ")
        wait_until(
            lambda: all(f"Process {pid}: " in running.stderr for pid in pids),
            lambda: running.stderr,
        )
        stderr = running.stderr
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert stderr.index("all x2: ") < stderr.index(f"Process {pids[0]}: ")


# ---- a slow start --------------------------------------------------------------------------


def test_a_start_that_stalls_says_where(
    fake_torch: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch is imported, the zygote's stack is shown; the launch continues."""
    held = tmp_path / "held"
    held.mkdir()
    monkeypatch.setenv("FAKE_TORCH_HOLDS_IN", str(held))
    monkeypatch.setenv("FAKE_TORCH_HOLDS_AT", "importing 0")
    words = ("--start-timeout", "0.2", "--nproc-per-node", "2", WHERE, "rest=end")
    with start_meshrun(*words, folder=tmp_path) as running:
        wait_until(lambda: "the process that starts" in running.stderr, lambda: running.stderr)
        wait_until(lambda: bool(list(held.iterdir())), lambda: running.stderr)
        running.signal(QUIT)
        wait_until(lambda: " in hold" in running.stderr, lambda: running.stderr)
        stderr = running.stderr
        (held / "go").touch()
        assert running.wait() == 0
    assert "meshrun: still starting after 0.2 s: torch is still being imported" in stderr
    assert f"{ZYGOTE}: " in stderr


def test_ranks_that_lag_behind_in_a_start_are_named(
    fake_torch: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per generation, with their stacks."""
    held = tmp_path / "held"
    held.mkdir()
    monkeypatch.setenv("FAKE_TORCH_HOLDS_IN", str(held))
    monkeypatch.setenv("FAKE_TORCH_HOLDS_AT", "joining 0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    words = ("--start-timeout", "0.2", "--nproc-per-node", "2", WHERE, "rest=end")
    with start_meshrun(*words, folder=tmp_path) as running:
        wait_until(lambda: "\nall x2: " in running.stderr, lambda: running.stderr)
        shown = running.stderr
        (held / "go").touch()
        assert running.wait() == 0
    assert "still starting after 0.2 s: 2 of 2 ranks have not started the program: all x2" in shown
    assert running.stderr.count("have not started the program") == 1


# ---- hangs ---------------------------------------------------------------------------------


def test_ranks_that_do_nothing_are_killed(fake_torch: object) -> None:
    """After their stacks are shown; the exit code is 124."""
    ours = run_meshrun("--hang-timeout", "0.5", "--nproc-per-node", "2", WHERE, "rest=sleep")

    assert ours.returncode == 124
    assert re.search(r"meshrun: no rank has made progress for \d+\.\d s", ours.stderr)
    assert "all x2: " in ours.stderr
    assert ours.stderr.index(" in sleep_soundly") < ours.stderr.index(f"error: {NO_PROGRESS}")


def test_a_hang_may_cause_a_restart(fake_torch: object) -> None:
    """The next generation then succeeds."""
    words = ("--hang-timeout", "1", "--max-restarts", "1", "--nproc-per-node", "2")
    ours = run_meshrun(*words, WHERE, "0.1=end", "1.1=end", "rest=sleep")

    assert ours.returncode == 0
    assert f"meshrun: restart 1 of 1, because {NO_PROGRESS} " in ours.stderr


@pytest.mark.parametrize("way", ["spin", "print", "beat"])
def test_one_rank_that_makes_progress_is_enough(
    way: str, fake_torch: object, tmp_path: Path
) -> None:
    """It uses CPU, prints or sends a heartbeat; the others may wait for it as long as it takes."""
    words = ("--hang-timeout", "1.5", "--nproc-per-node", "2", WHERE, f"0={way}", "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        let_pass(3)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert "no rank has made progress" not in running.stderr


def test_a_rank_that_has_sent_a_heartbeat_is_judged_by_heartbeats(fake_torch: object) -> None:
    """A rank that spins in a collective uses CPU too."""
    words = ("--hang-timeout", "1", "--nproc-per-node", "2")
    ours = run_meshrun(*words, WHERE, "0=last-beat", "rest=sleep")

    assert ours.returncode == 124
    assert " in spin" in ours.stderr
