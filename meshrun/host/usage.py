"""CPU time and memory of processes and everything below them, and GPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshrun.host.machine import Gpu
from meshrun.host.nvml import load_nvml


@dataclass(slots=True)
class Usage:
    """What a process and all below it use."""

    cpu_s: float = 0.0
    """CPU time since their start, of those that have ended too."""
    memory_bytes: int = 0
    """Resident memory; pages that processes share count in each."""
    stopped: bool = False
    """Whether the process itself is stopped, as by SIGSTOP."""


def usage_of_trees(roots: Iterable[int]) -> dict[int, Usage]:
    """Return what each of some processes and all below it use; one look at the process table."""
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
    """Return the CPU time, in seconds, of each of some processes with all below it."""
    return {pid: used.cpu_s for pid, used in usage_of_trees(roots).items()}


class GpuMemory:
    """Memory in use on some GPUs, from NVML where there is a driver."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._nvml = load_nvml() if gpus else None
        self._gpus = [gpu.uuid and self._nvml and self._nvml.gpu_of(gpu.uuid) for gpu in gpus]

    def used_bytes(self, index: int) -> int | None:
        """Return what is in use on a GPU, by any process; ``None`` if that is unknown."""
        gpu = self._gpus[index] if index < len(self._gpus) else None
        return self._nvml.used_bytes(gpu) if self._nvml and gpu else None
