"""CPU time and memory of process trees, and memory in use on GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import Struct

from meshrun.host.ask_driver import Driver
from meshrun.host.gpu_use import read_use
from meshrun.host.machine import Gpu


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


def read_gpu_memory(driver: Driver, gpus: Sequence[Gpu]) -> dict[int, int]:
    """Return the memory in use on GPUs by all processes, by their place, as far as it is known."""
    read = partial(read_use, gpus=gpus, with_holders=False)
    uses = (driver.ask(read) if gpus else None) or ()
    found = {use.gpu: use.used_bytes for use in uses}
    return {place: found[gpu] for place, gpu in enumerate(gpus) if gpu in found}
