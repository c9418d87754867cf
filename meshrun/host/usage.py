"""CPU time and memory of process trees, and memory in use on GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshrun.host.machine import Gpu
from meshrun.host.nvml import load_nvml


@dataclass(slots=True)
class Usage:
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


class GpuMemory:
    """Memory in use on GPUs, from NVML if there is a driver."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._nvml = load_nvml() if gpus else None
        self._gpus = [gpu.uuid and self._nvml and self._nvml.gpu_of(gpu.uuid) for gpu in gpus]

    def used_bytes(self, index: int) -> int | None:
        """Return the memory in use on a GPU by all processes; ``None`` if unknown."""
        gpu = self._gpus[index] if index < len(self._gpus) else None
        return self._nvml.used_bytes(gpu) if self._nvml and gpu else None
