"""What the kernel says of processes: their state, signals, CPU time, memory and delays."""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from msgspec import Struct

from meshrun.host.printable import one_line

_PF_EXITING = 4
_RUNNING = ("R", "S", "D")
"""States in /proc of a process that is neither stopped, traced nor over."""
_STOPS_IN_S = 1.0
_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Signals that do nothing to a process without a handler (signal(7))."""
_ON_LINUX = sys.platform == "linux"
_TICKS = os.sysconf("SC_CLK_TCK")


def process_name(pid: int) -> str:
    """Return the printable name of a process, "" if there is no such process."""
    return one_line(read_proc(pid, "comm").strip().decode(errors="replace"))


def read_proc(pid: int, file: str) -> bytes:
    """Return the contents of a file about a process in /proc, nothing if it cannot be read."""
    try:
        with open(f"/proc/{pid}/{file}", "rb") as opened:
            return opened.read()
    except OSError:
        return b""


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is currently a descendant of another."""
    import psutil

    try:
        return any(parent.pid == ancestor for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def is_exiting(pid: int) -> bool:
    """Return whether a process is exiting, even if its parent cannot reap it yet.

    Source:
        proc_pid_stat(5), field ``flags``; PF_EXITING in the kernel's ``include/linux/sched.h``.
    """
    state, *fields = read_stat(pid)
    return state in ("Z", "X") or (state != "" and bool(int(fields[5]) & _PF_EXITING))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, not by a debugger."""
    return read_stat(pid)[0] == "T"


def is_traced(pid: int) -> bool:
    """Return whether a debugger has stopped a process."""
    return read_stat(pid)[0] == "t"


def wait_until_stopped(pids: Iterable[int]) -> None:
    """Wait until processes that are being stopped no longer run, but at most for a second."""
    deadline = time.monotonic() + _STOPS_IN_S
    for pid in pids:
        while read_stat(pid)[0] in _RUNNING and time.monotonic() < deadline:
            time.sleep(0.002)  # the kernel notifies only parents


def is_foreground(fd: int) -> bool:
    """Return whether our job, or our parent's, is in the foreground of a terminal.

    The parent's counts if we have left its session, like a launch started from Python.

    Source:
        Fields 5, 7 and 8 of ``/proc/PID/stat``, proc(5).
    """
    try:
        return os.tcgetpgrp(fd) in (os.getpgrp(), 0)
    except OSError:  # not our controlling terminal
        stat = read_stat(os.getppid())
    if len(stat) < 6 or not os.isatty(fd) or int(stat[4]) != os.fstat(fd).st_rdev:
        return True  # a terminal without job control
    return stat[5] == stat[2]


def read_stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; ``[""]`` if there is no such process.

    Source:
        ``/proc/PID/stat``, proc(5): the state is field 3, after the name, which may have spaces.
    """
    text = read_proc(pid, "stat").decode(errors="replace")
    return text.rpartition(")")[2].split() or [""]


class SignalState(enum.Enum):
    """The state of a signal to a process, according to the kernel."""

    GONE = enum.auto()
    UNHANDLED = enum.auto()
    """The process neither handles nor ignores the signal, so it would end the process."""
    STOPPED = enum.auto()
    TRACED = enum.auto()
    """A debugger has stopped the process."""
    PENDING = enum.auto()
    RUNNING = enum.auto()
    """The handler is running."""
    DONE = enum.auto()
    """The signal is not pending and no handler is running; also before it is sent."""
    UNKNOWN = enum.auto()
    """The kernel does not report it (gVisor, macOS)."""


def threads_blocking(pid: int, signum: int) -> frozenset[str]:
    """Return the threads of a process that block a signal."""
    try:
        threads = _read_threads(pid)
        return frozenset(task for task in threads if _has(threads[task], "SigBlk", signum))
    except (OSError, KeyError, ValueError):
        return frozenset()


def signal_state(pid: int, signum: int, blocking: frozenset[str] = frozenset()) -> SignalState:
    """Return the state of a signal to a process; DONE only once its handler has returned.

    The kernel blocks a signal in the thread that handles it until the handler returns.

    ``blocking`` are the threads that blocked it before it was sent.

    Source:
        proc_pid_status(5): SigCgt, SigIgn, SigBlk, SigPnd and ShdPnd are masks in hexadecimal.
    """
    if not _ON_LINUX:
        return SignalState.UNKNOWN
    try:
        status, threads = read_status(f"/proc/{pid}/status"), _read_threads(pid)
    except (OSError, ValueError):
        return SignalState.GONE
    found = SignalState.DONE
    if status["State"].startswith(("Z", "X")):
        found = SignalState.GONE
    elif "SigCgt" not in status:
        found = SignalState.UNKNOWN
    elif not _has(status, "SigCgt", signum) and not _has(status, "SigIgn", signum):
        found = SignalState.UNHANDLED
    elif status["State"].startswith(("T", "t")):
        found = SignalState.STOPPED if status["State"].startswith("T") else SignalState.TRACED
    elif _has(status, "ShdPnd", signum) or any(
        _has(thread, "SigPnd", signum) for thread in threads.values()
    ):
        found = SignalState.PENDING
    elif any(_has(threads[task], "SigBlk", signum) for task in threads.keys() - blocking):
        found = SignalState.RUNNING
    elif is_exiting(pid):
        found = SignalState.GONE
    return found


def _has(status: dict[str, str], mask: str, signum: int) -> bool:
    return bool(int(status[mask], 16) & 1 << (signum - 1))


def _read_threads(pid: int) -> dict[str, dict[str, str]]:
    """Return the status of each thread of a process, except for those that end meanwhile."""
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            found[task] = read_status(f"/proc/{pid}/task/{task}/status")
    return found


def handles_signal(pid: int, signum: int) -> bool:
    """Return whether a process would survive a signal, as it handles, ignores or blocks it."""
    if signum in _HARMLESS or signal_state(pid, signum) is not SignalState.UNHANDLED:
        return True
    return str(pid) in threads_blocking(pid, signum)  # for sigwait()


def read_status(path: str) -> dict[str, str]:
    """Return the fields of a status file in /proc (proc_pid_status(5))."""
    with open(path, encoding="utf-8", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}


def marked_processes(entry: str) -> list[int]:
    """Return other processes that started with ``entry``, ``NAME=value``, in their environment.

    A fork shows the environment with which its parent's program was started (proc(5)).
    """
    if not _ON_LINUX:
        import psutil

        variable, _, value = entry.partition("=")
        processes = psutil.process_iter(["environ"])
        marked = [each for each in processes if (each.info["environ"] or {}).get(variable) == value]
        return [each.pid for each in marked if each.pid != os.getpid()]
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            # It may have ended, or belong to another user.
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if os.fsencode(entry) in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def started_at(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; ``None`` if it has ended.

    Source:
        Field 22 of ``/proc/PID/stat``, proc(5).
    """
    state, *fields = read_stat(pid)
    return fields[18] if state not in ("", "Z", "X") else None


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if there is no such process."""
    _, *fields = read_stat(pid)
    return int(fields[0]) if fields else 0


class Usage(Struct):
    """Resources used by a process and its descendants."""

    cpu_s: float = 0.0
    """CPU time since their start, including descendants that have ended."""
    memory_bytes: int = 0
    """Resident memory; shared pages count for each process."""
    stopped: bool = False
    """Whether the process itself is stopped, for example by SIGSTOP."""


def usage_of_trees(roots: Iterable[int]) -> dict[int, Usage]:
    """Return the resources used by each process tree, reading the process table once."""
    import psutil

    parents: dict[int, int] = {}
    own: dict[int, Usage] = {}
    total = {pid: Usage() for pid in roots}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                parents[process.pid] = process.ppid()
                times, memory = process.cpu_times(), process.memory_info()
                stopped = process.pid in total and process.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            continue
        waited = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        own[process.pid] = Usage(times.user + times.system + waited, memory.rss, stopped)
    for pid, used in own.items():
        above: int | None = pid
        while above is not None and above not in total:
            above = parents.get(above)
        if above is not None:
            total[above].cpu_s += used.cpu_s
            total[above].memory_bytes += used.memory_bytes
            total[above].stopped |= used.stopped
    return total


def cpu_seconds_of_trees(roots: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of each process tree, in seconds."""
    return {pid: used.cpu_s for pid, used in usage_of_trees(roots).items()}


class Delays(Struct, frozen=True, kw_only=True):
    """Seconds since a process started; ``steal_s`` is that of the machine since boot."""

    cpu_s: float = 0.0
    """Time on a core."""
    runnable_s: float = 0.0
    """Time ready to run, but without a core."""
    disk_s: float = 0.0
    """Time waiting for a disk; 0 unless the kernel counts it (``delayacct``)."""
    steal_s: float = 0.0
    """Time taken by the hypervisor, summed over all cores."""

    def __sub__(self, before: Delays) -> Delays:
        names = self.__struct_fields__
        return Delays(**{name: getattr(self, name) - getattr(before, name) for name in names})


def read_delays(pid: int) -> Delays:
    """Return the delays of a process's main thread; zeros if they cannot be read.

    Source:
        proc(5): ``/proc/PID/schedstat``, field 42 of ``/proc/PID/stat`` and ``/proc/stat``.
    """
    try:
        cpu_ns, wait_ns, _ = map(int, read_proc(pid, "schedstat").split())
        with open("/proc/stat", encoding="ascii") as file:
            machine = file.readline().split()
        return Delays(
            cpu_s=cpu_ns / 1e9,
            runnable_s=wait_ns / 1e9,
            disk_s=int(read_stat(pid)[39]) / _TICKS,
            steal_s=int(machine[8]) / _TICKS,
        )
    except (OSError, ValueError, IndexError):
        return Delays()
