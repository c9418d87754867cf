"""Temporary folders of launches whose processes were all killed: the next launch removes them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.kit import PROGRAMS, ROOT, run_meshrun, start_meshrun, wait_until

WAIT = PROGRAMS / "wait.py"
CALLS = """\
import sys
from meshrun import launch

print("called", flush=True)
launch(sys.argv[1], nproc_per_node=2)
"""


def folders() -> set[Path]:
    """Return the temporary folders that exist."""
    return set(Path(os.environ["TMPDIR"]).glob("meshrun_*"))


def end_with(code: int, folder: Path, *options: str) -> int:
    """Launch a program that exits with ``code``, and return the launch's exit code."""
    (program := folder / "ends.py").write_text(f"raise SystemExit({code})")
    return run_meshrun(*options, program).returncode


def kill_all(root: int) -> None:
    """Kill all processes of a launch before any of them can react to the others' deaths."""
    processes: list[psutil.Process] = []
    found = [psutil.Process(root)]
    while found:  # a stopped process starts no others
        for process in found:
            with suppress(psutil.NoSuchProcess):  # a short-lived process has ended
                process.send_signal(signal.SIGSTOP)
        processes += found
        found = [
            each for each in psutil.Process(root).children(recursive=True) if each not in processes
        ]
    for process in reversed(processes):  # the death of a parent wakes a stopped zygote
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: all(map(has_ended, processes)), lambda: str(processes))


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is dead, even if its parent has not reaped it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_folder_of_a_dead_launch_is_removed(fake_torch: object, tmp_path: Path) -> None:
    """By the next launch, as nobody else is left to do it."""
    with start_meshrun("--nproc-per-node", "2", WAIT, folder=tmp_path) as running:
        running.wait_for("up", 2)
        kill_all(running.process.pid)
        running.wait()
    assert len(folders()) == 1

    assert end_with(0, tmp_path) == 0
    assert folders() == set()


def test_the_folder_of_a_launcher_that_dies_at_the_end_is_removed(
    fake_torch: object, tmp_path: Path
) -> None:
    """The zygote, which is still stopping the ranks' leftovers, removes it afterwards."""
    (program := tmp_path / "leaves.py").write_text(
        "import os, signal, sys, time\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "    while True:\n"
        "        time.sleep(60)\n"
    )
    with start_meshrun("--shutdown-timeout", "2", program, folder=tmp_path) as running:
        running.wait_for("asked")
        running.process.kill()
        running.wait()
        wait_until(lambda: folders() == set(), lambda: str(folders()))


def test_the_folder_of_a_dead_caller_is_removed(fake_torch: object, tmp_path: Path) -> None:
    """launch() has its own besides the launcher's."""
    (script := tmp_path / "calls.py").write_text(CALLS)
    env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"}
    with subprocess.Popen(
        [sys.executable, script, WAIT], stdout=subprocess.PIPE, text=True, env=env
    ) as caller:
        assert caller.stdout is not None
        for text in ("called", "up", "up"):
            assert text in caller.stdout.readline()
        kill_all(caller.pid)
    assert len(folders()) == 2

    assert end_with(0, tmp_path) == 0
    assert folders() == set()


@pytest.mark.parametrize("content", [[], ["held.new"]])
def test_a_folder_whose_creator_was_killed_at_once_is_removed(
    fake_torch: object, tmp_path: Path, content: list[str]
) -> None:
    """Its creator never locked it; the creator of a recent one may still be about to."""
    old, new = (Path(os.environ["TMPDIR"]) / f"meshrun_{name * 16}" for name in "ab")
    for folder in (old, new):
        folder.mkdir()
        for name in content:
            (folder / name).touch()
    os.utime(old, (0, 0))

    assert end_with(0, tmp_path) == 0
    assert folders() == {new}
    shutil.rmtree(new)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_check_that_is_stopped_leaves_no_folder(
    is_early: bool, fake_torch: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by the signal like any launch, even before it has started the ranks."""
    (held := tmp_path / "held").mkdir()
    monkeypatch.setenv("FAKE_TORCH_HOLDS_IN", str(held))
    monkeypatch.setenv("FAKE_TORCH_HOLDS_AT", "importing 0")
    with start_meshrun("--check", "--mesh", "dp=2", "--device", "cpu", folder=tmp_path) as running:
        if is_early:
            while not folders():  # without pauses, to find it as soon as it exists
                assert running.process.poll() is None, running.stderr
        else:
            wait_until((held / "at.0.zygote").exists, lambda: running.stderr)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143
    assert folders() == set()


def test_the_folder_of_a_running_launch_stays(fake_torch: object, tmp_path: Path) -> None:
    """So does one that only has a similar name, and one with logs that the user asked for."""
    (similar := Path(os.environ["TMPDIR"]) / "meshrun_notes").mkdir()
    os.utime(similar, (0, 0))
    assert end_with(5, tmp_path, "--tee", "3") == 5
    (logs,) = folders() - {similar}
    with start_meshrun("--nproc-per-node", "2", WAIT, folder=tmp_path) as running:
        running.wait_for("up", 2)
        (living,) = folders() - {similar, logs}
        assert end_with(0, tmp_path) == 0

        assert folders() == {similar, logs, living}
        assert (living / "attempt_0").is_dir()
        running.signal(signal.SIGTERM)
        running.wait()
    assert folders() == {similar, logs}
    for folder in (similar, logs):
        shutil.rmtree(folder)
