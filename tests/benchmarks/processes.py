"""Run a command, observe it through /proc, and leave no processes behind."""

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
"""How often killing is tried; what survives is held by the kernel."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class NotMeasured(Exception):
    """A command did not do what should be measured."""


@dataclass(frozen=True)
class Run:
    """One finished run of a command."""

    seconds: float
    exit_code: int


def adopt_orphans() -> None:
    """Become the parent of processes that a dead launcher leaves, to be able to find them.

    Ranks have their own sessions, so they are in no common process group.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def time_to_end(command: Command) -> Run:
    """Run a command, discard its output, and return its wall time.

    ``wait`` gets no timeout, since with one it polls and may be up to 50 ms late.
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
        NotMeasured: If it does not exit with 0; the message has its stderr.
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

    If the benchmark is killed, the kernel closes the pipe, and the ranks exit on their own.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Opened for reading and writing, as opening only for writing would wait for a reader.
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        """Release the ranks; does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def gate() -> Iterator[Gate]:
    """Create a gate for one launch."""
    with tempfile.TemporaryDirectory() as folder:
        made = Gate(Path(folder) / "gate")
        try:
            yield made
        finally:
            made.open()


@contextmanager
def idle_ranks(command: Command, ranks: int, held_by: Gate) -> Iterator[psutil.Process]:
    """Launch ranks, wait until each has printed ``ready``, and yield the launcher.

    Args:
        command: A launch whose ranks print ``ready`` and then wait for ``held_by``.
        ranks: How many there are.
        held_by: Opened at the end, so that the ranks exit on their own.

    Raises:
        NotMeasured: If the launch ends before all ranks are ready, or fails.
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
    process.stdout.read()  # otherwise a launcher that prints a lot would never exit
    process.stdout.close()
    code = process.wait()
    _end_leftovers(command.name)
    if code:
        raise NotMeasured(f"{command.name} exited with {code} after its ranks were idle")


def tree(launcher: psutil.Process) -> list[int]:
    """Return the process ids of the launcher and its descendants."""
    return [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]


def pss_bytes(pid: int) -> int:
    """Return a process's proportional share of memory: a page shared by n processes counts 1/n."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.split()[0]) * 1024
    raise NotMeasured(f"no Pss in /proc/{pid}/smaps_rollup")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of one process without its children (proc(5), utime and stime)."""
    # The name in parentheses may contain spaces, so fields are counted after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def end_everything() -> int:
    """End all descendants of this process and return how many there were.

    Launchers get SIGTERM first, as they know best how to end their ranks; then everything is
    killed. Signals are blocked meanwhile, so that they cannot interrupt this halfway.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    me = psutil.Process()
    seen = {child.pid for child in _alive(me)}
    launchers = me.children()
    for child in launchers:
        _send(child, signal.SIGTERM)
    psutil.wait_procs(launchers, timeout=_GRACE_S)
    for _ in range(_KILLS):  # this process adopts a killed launcher's ranks and kills them next
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
    """Turn signals that end a process into an exception, so that ``finally`` blocks run."""

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
    """End and report processes that outlived a command and would disturb the next."""
    _reap()
    if psutil.Process().children() and (count := end_everything()):
        print(f"{count} processes outlived {name}", file=sys.stderr)


def _reap() -> None:
    """Reap adopted orphans that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
