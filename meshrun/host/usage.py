"""CPU time and memory of process trees, and what delays a process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from msgspec import Struct

from meshrun.host.processes import read_stat

_TICKS = os.sysconf("SC_CLK_TCK")


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
        return Delays(
            cpu_s=self.cpu_s - before.cpu_s,
            runnable_s=self.runnable_s - before.runnable_s,
            disk_s=self.disk_s - before.disk_s,
            steal_s=self.steal_s - before.steal_s,
        )


def read_delays(pid: int) -> Delays:
    """Return the delays of a process's main thread; zeros if they cannot be read.

    Source:
        proc(5): ``/proc/PID/schedstat``, field 42 of ``/proc/PID/stat`` and ``/proc/stat``.
    """
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            cpu_ns, wait_ns, _ = map(int, file.read().split())
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
