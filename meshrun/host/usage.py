"""CPU time and memory of process trees, and memory in use on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class GpuMemory:
    """The last reading of the memory in use on GPUs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._driver = Driver(note)
        self._used: list[int | None] = []

    def read(self, gpus: Sequence[Gpu]) -> None:
        """Read the memory in use on ``gpus``, unless the driver hangs."""
        read = partial(read_use, gpus=gpus, with_holders=False)
        uses = (self._driver.ask(read) if gpus else None) or ()
        found = {use.gpu: use.used_bytes for use in uses}
        self._used = [found.get(gpu) for gpu in gpus]

    def used_bytes(self, index: int) -> int | None:
        """Return the memory in use on a GPU by all processes; ``None`` if unknown."""
        return self._used[index] if index < len(self._used) else None

    def close(self) -> None:
        """Stop waiting for the driver."""
        self._driver.close()
