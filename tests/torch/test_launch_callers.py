"""Callers of launch(): threads, ranks, scripts and notebooks; a killed one leaves nothing."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import meshrun
from meshrun.api.child_launcher import run_launcher
from tests.kit import wait_until
from tests.launching import python, rank, run
from tests.variations import ordinary

pytestmark = pytest.mark.torch

SCRIPT = """\
import os, signal, sys
import meshrun

print("imported", flush=True)
LIMIT = 3

class Point:
    def __init__(self, rank):
        self.rank = rank

class NanError(Exception):
    pass

def function():
    return Point(int(os.environ["RANK"]) + LIMIT)

def fail():
    raise NanError("nan")

def wait():
    print("up", flush=True)
    signal.pause()
"""
SLOW = """\
import os, signal, sys, time

def wait(caller=os.getppid()):
    open(os.environ["SLOW_SAYS"], "w").close()
    while os.getppid() == caller:
        time.sleep(0.001)

def slow(signum, handler, change=signal.signal):
    if signum == signal.SIGTERM and os.environ["SLOW_BEFORE"] == "handler":
        wait()
    found = change(signum, handler)
    if signum == signal.SIGTERM and os.environ["SLOW_BEFORE"] == "request":
        wait()
    return found

if "launcher" in sys.orig_argv:
    signal.signal = slow
"""
BODY = """\
points = meshrun.launch(function, nproc_per_node=2, device="cpu")
print([type(point) is Point and point.rank for point in points])
try:
    meshrun.launch(fail, device="cpu")
except NanError as error:
    print(error)
"""


def test_a_thread_may_launch(fake_torch: Path) -> None:
    """Several at the same time."""
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda size: run(rank, nproc_per_node=size), [1, 2]))

    assert found == [[0], [0, 1]]


def test_a_rank_may_launch(fake_torch: Path) -> None:
    """The inner launch has its own ranks."""

    def nested() -> list[int]:
        return meshrun.launch(rank, nproc_per_node=2, device="cpu")

    assert run(nested, nproc_per_node=2) == [[0, 1], [0, 1]]


def test_variables_of_options_do_not_apply_to_a_launch_inside_a_rank(
    fake_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would request the outer launch's port, folder or size again."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_RUN_PATH", "1")  # which does not apply to functions at all

    def nested() -> list[int]:
        return meshrun.launch(rank, device="cpu")

    assert run(nested) == [[0]] * 3


@pytest.mark.parametrize("guard", ordinary([True, False], False))
def test_functions_of_a_script_need_no_guard(guard: bool, fake_torch: Path, tmp_path: Path) -> None:
    """The script runs once, in the caller; its classes are the same in ranks and caller."""
    body = f"if __name__ == '__main__':\n    {BODY.replace(chr(10), chr(10) + '    ')}"
    (tmp_path / "script.py").write_text(SCRIPT + (body if guard else BODY))
    ours = python("script.py", cwd=tmp_path)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == "imported\n[3, 4]\nnan\n"


def test_functions_of_a_notebook_travel(fake_torch: Path, tmp_path: Path) -> None:
    """A notebook executes cells in a namespace and replaces sys.stdout."""
    (tmp_path / "cells.txt").write_text(SCRIPT + BODY + "meshrun.launch(lambda: print(LIMIT))\n")
    kernel = (
        "import contextlib, io, sys\n"
        "stream = io.StringIO()\n"
        "with contextlib.redirect_stdout(stream):\n"
        "    exec(open('cells.txt').read(), {'__name__': '__main__'})\n"
        "print(repr(stream.getvalue()))\n"
    )
    ours = python("-c", kernel, cwd=tmp_path)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == repr("imported\n[3, 4]\nnan\n[rank 0] 3\n") + "\n"


def test_a_keyboard_interrupt_ends_the_launch(fake_torch: Path) -> None:
    """It is raised once everything has ended; the handler is restored."""

    def interrupt(pid: int) -> None:
        os.kill(pid, signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, args=(os.getpid(),))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_handler_that_raises_ends_a_launcher_that_has_just_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process was unknown, and went on, if the handler ran within Popen()."""
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)
            os.kill(os.getpid(), signal.SIGUSR1)

    def give_up(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(subprocess, "Popen", Popen)
    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(TimeoutError):
            run_launcher(["sleep", "600"], env=os.environ, cwd=None, stdin=None)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_three_interrupts_kill_at_once(fake_torch: Path) -> None:
    """Even a rank that ignores signals."""

    def interrupt(pid: int) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: os.kill(pid, signal.SIGINT))
        os.kill(pid, signal.SIGINT)
        while True:
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, args=(os.getpid(),), shutdown_timeout=600)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_caller_that_is_killed_leaves_nothing(
    signum: int, fake_torch: Path, tmp_path: Path
) -> None:
    """Neither a process nor its folder, as a fixture checks."""
    (tmp_path / "script.py").write_text(
        SCRIPT + "meshrun.launch(wait, nproc_per_node=2, device='cpu')\n"
    )
    printed = tmp_path / "printed"
    with open(printed, "wb") as file:
        caller = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=file)
    try:
        wait_until(lambda: printed.read_text().count("up") == 2, printed.read_text)
    finally:
        caller.send_signal(signum)

    assert caller.wait() == -signum


def test_a_caller_that_is_killed_early_leaves_nothing(fake_torch: Path, tmp_path: Path) -> None:
    """While its launcher is still importing."""
    (tmp_path / "script.py").write_text(SCRIPT + "meshrun.launch(wait, device='cpu')\n")
    caller = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    try:
        wait_until(lambda: bool(psutil.Process(caller.pid).children()), lambda: "no launcher")
    finally:
        caller.kill()
    caller.wait()


@pytest.mark.parametrize("before", ["handler", "request"])
def test_a_caller_that_is_killed_at_the_wrong_moment_leaves_nothing(
    fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """After the launcher has checked its parent, before it requests a parent-death signal."""
    (tmp_path / "script.py").write_text(SCRIPT + "meshrun.launch(wait, device='cpu')\n")
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLOW_BEFORE", before)
    monkeypatch.setenv("SLOW_SAYS", str(says := tmp_path / "says"))
    caller = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    try:
        wait_until(says.exists, lambda: "no launcher got that far")
    finally:
        caller.kill()
    caller.wait()
