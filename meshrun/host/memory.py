"""Out-of-memory kills, from the kernel's counters. Linux only."""

from __future__ import annotations

import os
from pathlib import Path

from meshrun.wording import count

_FULL_BYTES = 1024 * 1024
_MOUNTS = {"": "", "memory": "memory"}
"""Mount points of cgroups below ``/sys/fs/cgroup`` by controller, of version 2 and version 1."""


class MemoryWatch:
    """The kernel's counters at the start of the launch, for later comparison.

    Source:
        kernel, Documentation/admin-guide/cgroup-v2.rst (``memory.events``) and
        cgroup-v1/memory.rst (``memory.oom_control``); ``oom_kill`` in proc(5), ``/proc/vmstat``.
    """

    def __init__(self, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self._proc, self._sysfs = proc, sysfs
        self._cgroup = self._find_cgroup()
        self._in_cgroup = self._count(self._cgroup)
        self._in_machine = _read_field(proc / "vmstat", "oom_kill")

    def why_killed(self) -> str | None:
        """Return a sentence about out-of-memory kills since the start, ``None`` without any."""
        if self._cgroup is not None and (new := self._count(self._cgroup) - self._in_cgroup) > 0:
            limit = self._limit()
            at = f" of {limit / 2**30:.1f} GiB" if limit else ""
            killed = f"the kernel killed {count(new, 'process')} at this job's limit{at}"
            return f"out of memory: {killed}"
        new = _read_field(self._proc / "vmstat", "oom_kill") - self._in_machine
        if new > 0:
            # This includes kills at the limit of other cgroups.
            killed = f"the kernel killed {count(new, 'process')} on this machine meanwhile"
            return f"possibly out of memory: {killed}"
        return None

    def _find_cgroup(self) -> Path | None:
        """Return the folder of this process's cgroup, or of its nearest visible ancestor."""
        try:
            lines = (self._proc / "self/cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in sorted(lines, key=lambda line: ":memory:" not in line):
            _, controllers, path = line.split(":", 2)
            if controllers not in _MOUNTS:
                continue
            root = self._sysfs / "fs/cgroup" / _MOUNTS[controllers]
            folder = root / path.lstrip("/")
            for candidate in (folder, *folder.parents):
                if self._has_count(candidate):
                    return candidate
                if candidate == root:
                    break
        return None

    @staticmethod
    def _has_count(folder: Path) -> bool:
        return any((folder / name).exists() for name in ("memory.events", "memory.oom_control"))

    @staticmethod
    def _count(folder: Path | None) -> int:
        if folder is None:
            return 0
        events = _read_field(folder / "memory.events", "oom_kill")
        return events or _read_field(folder / "memory.oom_control", "oom_kill")

    def _limit(self) -> int | None:
        assert self._cgroup is not None  # noqa: S101 - checked by the caller
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limit = int((self._cgroup / name).read_text())
            except (OSError, ValueError):
                continue
            return limit if limit < 2**60 else None
        return None


def describe_full_shm(path: str = "/dev/shm") -> str | None:  # noqa: S108 - only inspected
    """Return a sentence if shared memory is full, else ``None``."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    if found.f_bavail * found.f_frsize >= _FULL_BYTES:
        return None
    size = found.f_blocks * found.f_frsize
    return f"{path} is full: {size / 2**20:,.0f} MiB"


def _read_field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
