"""Processes and threads that the kernel refused at the limit of a cgroup. Linux only."""

from __future__ import annotations

from pathlib import Path

from meshrun.host.sysfs import cgroup_folders, read_counter, read_number


class ProcessLimit:
    """The kernel's counters at the start of the launch, for later comparison.

    Source:
        kernel, Documentation/admin-guide/cgroup-v2.rst (``pids.events``, ``pids_localevents``):
        version 1, and older kernels, count in the cgroup of the process, even if the limit that it
        reached is that of a cgroup above; newer kernels count where the limit is.
    """

    def __init__(self, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self._folders = [*cgroup_folders("pids", proc, sysfs)]
        self._before = self._refused()

    def why_refused(self) -> str | None:
        """Return that the limit was reached since the start; ``None`` if it was not."""
        refused = zip(self._refused(), self._before, strict=True)
        for place, (now, before) in enumerate(refused):
            limits = (read_number(folder / "pids.max") for folder in self._folders[place:])
            limit = next((limit for limit in limits if limit is not None), None)
            if now > before and limit is not None:
                what = f"its limit of {limit:,} processes and threads"
                return f"this job reached {what}, pids.max of its cgroup"
        return None

    def _refused(self) -> list[int]:
        return [read_counter(folder / "pids.events", "max") for folder in self._folders]
