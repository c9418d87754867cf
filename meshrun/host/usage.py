"""CPU time and memory of processes and everything below them, and GPU memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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
    """Memory in use on the GPUs that this process sees, from NVML where there is its module."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self._nvml: Any = None
        self._gpus: list[Any] = []
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        from meshrun.host.topology import visible_pci_addresses

        try:
            nvml.nvmlInit()
            for address in visible_pci_addresses(env) or ():
                found = address and nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
                self._gpus.append(found or None)
        except nvml.NVMLError:
            return
        self._nvml = nvml

    def used_bytes(self, index: int) -> int | None:
        """Return what is in use on a GPU, by whomever; ``None`` if that cannot be told."""
        if self._nvml is None or index >= len(self._gpus) or self._gpus[index] is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpus[index]).used)
        except self._nvml.NVMLError:
            return None
