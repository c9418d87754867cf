"""Causes of delay of a process: other processes on its cores, the hypervisor, the disk."""

from __future__ import annotations

import os

from msgspec import Struct

from meshrun.host.processes import read_stat

_TICKS = os.sysconf("SC_CLK_TCK")


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
