"""Where is everybody: stacks on demand, when a start stalls, and when nobody gets on."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, Running, let_pass, run_meshrun, start_meshrun, wait_until

WHERE = PROGRAMS / "where.py"
QUIT = signal.SIGQUIT


def ask(running: Running, *answers: str, times: int = 1) -> str:
    """Ask where ranks are until all have come there, a moment after they say `up`.

    The launcher may hear that a rank has started after the rank's own first word.
    """
    while any(running.stderr.count(answer) < times for answer in answers):
        told = running.stderr.count("    pid")
        running.signal(QUIT)
        wait_until(
            lambda told=told: running.stderr.count("    pid") > told,
            lambda: running.stderr,
        )
    return running.stderr


def test_equal_stacks_are_merged_and_the_launch_goes_on(fake_torch: object, tmp_path: Path) -> None:
    """By coordinates, with the user's own place; a thread of the user's is told too."""
    words = ("--mesh", "dp=2,tp=2", "--mesh-init", "lazy", WHERE, "rest=sleep", "3=thread")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 4)
        place = f"{WHERE}".removeprefix(f"{os.getcwd()}/")
        beside = f"dp1 tp1: {place}:17 in sleep_soundly (and 1 other thread)\n"
        told = ask(running, beside, f"rank 0-2 x3: {place}:17 in sleep_soundly\n", times=2)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert told.count("meshrun: SIGQUIT: showing where the ranks are") >= 2
    assert f"    a thread: {place}:17 in sleep_soundly\n" in told
    assert "meshrun/worker" not in told


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_ps_says_who_is_who(fake_torch: object, tmp_path: Path, method: str) -> None:
    """Titles name rank and coordinate, stacks the process ids; arguments stay the program's."""
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
        told = ask(running, "all x4: ")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert titles == [
        f"meshrun launcher --mesh dp=2,tp=2 --mesh-init lazy --start-method {method} {program} a b",
        f"meshrun zygote {program} a b",
        "meshrun store",
        *(f"meshrun rank {rank} [dp{rank // 2} tp{rank % 2}] {program} a b" for rank in range(4)),
    ]
    (named,) = re.findall("all x4: [^\n]+\n(?:    .+\n)*?    pids ([0-9-,]+)", told)
    assert numbers_in(named) == below[1:]


def title_of(pid: int) -> str:
    """Return the one argument that ``ps`` and psutil find of a process."""
    shown = Path(f"/proc/{pid}/cmdline").read_text()
    assert shown.count("\0") == 1, shown
    return shown.removesuffix("\0")


def numbers_in(text: str) -> list[int]:
    """Return what ``4-6,9`` stands for."""
    ends = [part.split("-") for part in text.split(",")]
    return [pid for part in ends for pid in range(int(part[0]), int(part[-1]) + 1)]


def test_ranks_that_cannot_answer_are_named(fake_torch: object, tmp_path: Path) -> None:
    """A rank that is stopped is not ended by the question, and no other waits for it."""
    words = ("--nproc-per-node", "4", WHERE, "0=stop", "1=closed", "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 4)
        stopped = running.below_zygote()[1]
        wait_until(
            lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T",
            lambda: "rank 0 is not stopped",
        )
        closed = "the program closed the file meshrun opened for it"
        ask(running, f"rank 1: wrote no stack: {closed}", "rank 2-3 x2: ")
        wait_until(
            lambda: "rank 0: is suspended (SIGCONT resumes it)" in running.stderr,
            lambda: running.stderr,
        )
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


def test_a_command_is_left_alone(tmp_path: Path) -> None:
    """The signal would end it."""
    words = ("--no-python", "--nproc-per-node", "2", "sh", "-c", "echo up; exec sleep 600")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        ask(running, "all x2: is not running Python that meshrun started, or not yet")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


def test_fresh_interpreters_answer_too(fake_torch: object, tmp_path: Path) -> None:
    """With --start-method exec."""
    words = ("--nproc-per-node", "2", "--start-method", "exec", WHERE, "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        assert "in sleep_soundly" in ask(running, "all x2: ")
        running.signal(signal.SIGTERM)
        assert running.wait() == 143


def test_sigquit_ends_a_launch_where_that_is_asked_for(fake_torch: object, tmp_path: Path) -> None:
    """As for torchrun."""
    words = ("--signals-to-handle", "SIGQUIT", "--nproc-per-node", "2", WHERE, "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        running.signal(QUIT)
        assert running.wait() == 128 + QUIT
    assert "where the ranks are" not in running.stderr


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not on the PATH")
def test_native_stacks_follow_where_they_can_be_had(fake_torch: object, tmp_path: Path) -> None:
    """py-spy's, of each rank; and the launch goes on."""
    words = ("--nproc-per-node", "2", WHERE, "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        pids = running.below_zygote()[1:]
        ask(running, "all x2: ")
        wait_until(
            lambda: all(f"Process {pid}: " in running.stderr for pid in pids),
            lambda: running.stderr,
        )
        told = running.stderr
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert told.index("all x2: ") < told.index(f"Process {pids[0]}: ")


# ---- a start that stalls -------------------------------------------------------------------


def test_a_start_that_stalls_tells_where(
    fake_torch: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch is imported it is the zygote's stack, if it has come that far; all goes on."""
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
        told = running.stderr
        (held / "go").touch()
        assert running.wait() == 0
    assert "meshrun: still starting after 0.2 s: torch is still being imported" in told
    assert "the process that starts the ranks: " in told


def test_ranks_that_lag_behind_in_a_start_are_named(
    fake_torch: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a generation, with their stacks."""
    held = tmp_path / "held"
    held.mkdir()
    monkeypatch.setenv("FAKE_TORCH_HOLDS_IN", str(held))
    monkeypatch.setenv("FAKE_TORCH_HOLDS_AT", "joining 0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    words = ("--start-timeout", "0.2", "--nproc-per-node", "2", WHERE, "rest=end")
    with start_meshrun(*words, folder=tmp_path) as running:
        wait_until(lambda: "\nall x2: " in running.stderr, lambda: running.stderr)
        told = running.stderr
        (held / "go").touch()
        assert running.wait() == 0
    assert "still starting after 0.2 s: 2 of 2 ranks have not started the program: all x2" in told
    assert running.stderr.count("have not started the program") == 1


# ---- nobody gets on ------------------------------------------------------------------------


def test_ranks_that_do_nothing_are_ended(fake_torch: object) -> None:
    """With their stacks first, and an exit code of its own."""
    ours = run_meshrun("--hang-timeout", "0.5", "--nproc-per-node", "2", WHERE, "rest=sleep")

    assert ours.returncode == 124
    assert re.search(r"meshrun: no rank has made progress for \d+\.\d s", ours.stderr)
    assert "all x2: " in ours.stderr
    assert ours.stderr.index(" in sleep_soundly") < ours.stderr.index(
        "error: no rank made progress for"
    )


def test_a_hang_may_be_a_reason_to_start_again(fake_torch: object) -> None:
    """The next generation then ends well."""
    words = ("--hang-timeout", "1", "--max-restarts", "1", "--nproc-per-node", "2")
    ours = run_meshrun(*words, WHERE, "0.1=end", "1.1=end", "rest=sleep")

    assert ours.returncode == 0
    assert "meshrun: restart 1 of 1, because no rank made progress for " in ours.stderr


@pytest.mark.parametrize("way", ["spin", "print", "beat"])
def test_one_rank_that_gets_on_is_enough(way: str, fake_torch: object, tmp_path: Path) -> None:
    """It works, prints or says so; the others may wait for it as long as it takes."""
    words = ("--hang-timeout", "1.5", "--nproc-per-node", "2", WHERE, f"0={way}", "rest=sleep")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        let_pass(3)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert "no rank has made progress" not in running.stderr


def test_a_rank_that_has_beaten_is_judged_by_its_beats(fake_torch: object) -> None:
    """One that spins in a collective uses CPU too."""
    words = ("--hang-timeout", "1", "--nproc-per-node", "2")
    ours = run_meshrun(*words, WHERE, "0=last-beat", "rest=sleep")

    assert ours.returncode == 124
    assert " in spin" in ours.stderr
