"""Runs a command, looks at it from outside through /proc, and leaves nothing of it behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.commands import Command

_PR_SET_CHILD_SUBREAPER = 36
_HANG_S = 180.0
_GRACE_S = 5.0
"""How long launchers may take to end their ranks before everything is killed."""
_KILLS = 10
"""How often that is tried; what outlives it is held by the kernel."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class NotMeasured(Exception):
    """A command did not do what was to be measured."""


@dataclass(frozen=True)
class Run:
    """One finished run of a command."""

    seconds: float
    exit_code: int


def adopt_orphans() -> None:
    """Become the parent of what a dead launcher leaves, which could not be found otherwise.

    Ranks live in sessions of their own, so a process group does not hold them.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def time_to_end(command: Command) -> Run:
    """Run a command with its output thrown away and return its wall time.

    No timeout is given to ``wait``: with one, it would poll, and up to 50 ms late.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        command.argv,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    hang_guard = threading.Timer(_HANG_S, process.kill)  # torchrun's fork mode can deadlock
    hang_guard.daemon = True
    hang_guard.start()
    try:
        exit_code = process.wait()
    finally:
        hang_guard.cancel()
    seconds = time.perf_counter() - began
    _end_leftovers(command.name)
    return Run(seconds, exit_code)


def read_output(command: Command) -> str:
    """Run a command and return what it printed to stdout.

    Raises:
        NotMeasured: If it did not exit with 0, with what it said.
    """
    ended = subprocess.run(
        command.argv,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    _end_leftovers(command.name)
    if ended.returncode:
        raise NotMeasured(f"{command.name} exited with {ended.returncode}:\n{ended.stderr}")
    return ended.stdout


class Gate:
    """A named pipe that idle ranks read from until its only writer, this process, closes it.

    Should the benchmark be killed, the kernel closes it, and the ranks end by themselves.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Opened for both directions, since opening for writing alone waits for a reader.
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        """Let the ranks go on; harmless if they were let go already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def gate() -> Iterator[Gate]:
    """Make a gate for the time of one launch."""
    with tempfile.TemporaryDirectory() as folder:
        made = Gate(Path(folder) / "gate")
        try:
            yield made
        finally:
            made.open()


@contextmanager
def idle_ranks(command: Command, ranks: int, held_by: Gate) -> Iterator[psutil.Process]:
    """Launch ranks, wait until each has said ``ready``, and lend out the launcher.

    Args:
        command: A launch whose ranks print ``ready`` and then wait for ``held_by``.
        ranks: How many there are.
        held_by: Opened at the end, so that the ranks end by themselves.

    Raises:
        NotMeasured: If the launch ended before all were ready, or ended badly.
    """
    process = subprocess.Popen(
        command.argv,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    ready = 0
    while ready < ranks:
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            raise NotMeasured(f"{command.name} exited with {code}, {ready} of {ranks} ranks ready")
        ready += line.count(b"ready")  # two ranks may share a line under torchrun
    yield psutil.Process(process.pid)
    held_by.open()
    process.stdout.read()  # else a launcher with much to say would never end
    process.stdout.close()
    code = process.wait()
    _end_leftovers(command.name)
    if code:
        raise NotMeasured(f"{command.name} exited with {code} after its ranks were idle")


def tree(launcher: psutil.Process) -> list[int]:
    """Return the ids of the launcher and of everything below it."""
    return [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]


def pss_bytes(pid: int) -> int:
    """Return a process's share of memory: pages in use by n processes count 1/n for each."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.split()[0]) * 1024
    raise NotMeasured(f"no Pss in /proc/{pid}/smaps_rollup")


def cpu_seconds(pid: int) -> float:
    """Return the processor time of one process, its children left out (proc(5), utime, stime)."""
    # The name in parentheses may hold blanks, so fields are counted from behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def end_everything() -> int:
    """End every process below this one and return how many there were.

    Launchers are asked first, since they know best how to end their ranks; then all is killed.
    A signal that comes meanwhile is kept for later, so that it does not leave half of them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    me = psutil.Process()
    seen = {child.pid for child in _alive(me)}
    launchers = me.children()
    for child in launchers:
        _send(child, signal.SIGTERM)
    psutil.wait_procs(launchers, timeout=_GRACE_S)
    for _ in range(_KILLS):  # ranks of a killed launcher come to us, and are killed next
        children = _alive(me)
        if not children:
            break
        seen.update(child.pid for child in children)
        for child in children:
            _send(child, signal.SIGKILL)
        psutil.wait_procs(children, timeout=1.0)
    _reap()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return len(seen)


def stop_on_signals() -> None:
    """Turn the signals that end a process into an exception, so that ``finally`` is reached."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in _STOP_SIGNALS:
        signal.signal(number, stop)


def _alive(me: psutil.Process) -> list[psutil.Process]:
    return [child for child in me.children(recursive=True) if _is_alive(child)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, signum: signal.Signals) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        pass


def _end_leftovers(name: str) -> None:
    """End what outlived a command, which would disturb the next one, and say so."""
    _reap()
    if psutil.Process().children() and (count := end_everything()):
        print(f"{count} processes outlived {name}", file=sys.stderr)


def _reap() -> None:
    """Take the status of orphans that ended as our children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
