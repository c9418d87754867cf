"""The cores that this process may use: its affinity mask, limited by its cgroup's quota."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from meshrun.host.sysfs import cgroup_folders, read_text

_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def bind_to_cpus(cpus: Collection[int]) -> None:
    """Bind this process to logical CPUs; do nothing without CPUs."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def may_bind() -> bool:
    """Return whether this process may be bound to CPUs, which a seccomp profile can refuse."""
    try:
        bind_to_cpus(allowed_cpus())
    except OSError:
        return False
    return True


def count_usable_cores() -> int:
    """Return the number of cores this process may keep busy, at least 1.

    Source:
        ``cpu.max`` of cgroup v2 (kernel, Documentation/admin-guide/cgroup-v2.rst): quota and
        period in microseconds, or ``max``; the lowest of the own cgroup and its parents applies.
        ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of version 1 (scheduler/sched-bwc.rst).
    """
    quotas = map(_quota_of, cgroup_folders("cpu"))
    return max(1, math.ceil(min([count_cores()[0], *quotas])))


def count_cores() -> tuple[int, int]:
    """Return (number of cores this process may run on, number of cores of the machine)."""
    cores = os.cpu_count() or 1
    return len(allowed_cpus()) or cores, cores


def allowed_cpus() -> Collection[int]:
    """Return the logical CPUs that this process may run on; none without a mask, as on macOS."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()


def _quota_of(folder: Path) -> float:
    words = read_text(folder / "cpu.max").split() or [read_text(folder / name) for name in _V1]
    try:
        limit, period = map(int, words)
    except ValueError:  # `max`, or no quotas
        return math.inf
    return limit / period if limit > 0 and period > 0 else math.inf
