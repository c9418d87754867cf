"""The memory in use on each GPU, and the processes that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from meshrun.host.ask_driver import Driver
from meshrun.host.machine import Gpu
from meshrun.host.nvml import GpuProcess, Nvml
from meshrun.host.processes import is_below, process_name
from meshrun.wording import size


class Holder(Struct, frozen=True, kw_only=True):
    """A process with memory on a GPU."""

    pid: int
    name: str
    """Empty if the process is not visible: it is in another container, or has ended."""
    used_bytes: int | None
    is_ours: bool
    """Whether this launch started it."""

    def __str__(self) -> str:
        used = "" if self.used_bytes is None else f" {size(self.used_bytes)}"
        if not self.name:
            return f"pid {self.pid}{used}, exited or in another container"
        return f"pid {self.pid} ({self.name}){used}, {'' if self.is_ours else 'not '}of this launch"


class GpuUse(Struct, frozen=True, kw_only=True):
    """The memory in use on a GPU."""

    gpu: Gpu
    used_bytes: int
    holders: tuple[Holder, ...] = ()

    def __str__(self) -> str:
        who = "; ".join(map(str, self.holders)) or "no process visible to NVML"
        return f"GPU {self.gpu.label} has {size(self.used_bytes)} in use ({who})"


def read_use(
    nvml: Nvml | None,
    gpus: Sequence[Gpu],
    *,
    with_holders: bool = True,
    roots: Sequence[int] = (),
) -> list[GpuUse]:
    """Return the memory in use on each GPU that answers, and who holds it.

    Processes below ``roots`` belong to this launch.
    """
    if nvml is None:
        return []
    found = []
    for gpu in gpus:
        handle = nvml.gpu_of(gpu.uuid) if gpu.uuid else None
        used = None if handle is None else nvml.used_bytes(handle)
        if handle is not None and used is not None:
            processes = nvml.processes(handle) if with_holders else ()
            holders = tuple(_holder(process, roots) for process in processes)
            found.append(GpuUse(gpu=gpu, used_bytes=used, holders=holders))
    return found


def _holder(process: GpuProcess, roots: Sequence[int]) -> Holder:
    pid = process.pid
    return Holder(
        pid=pid,
        name=process_name(pid),
        used_bytes=process.used_bytes,
        is_ours=any(pid == root or is_below(pid, root) for root in roots),
    )


def read_gpu_memory(driver: Driver, gpus: Sequence[Gpu]) -> dict[int, int]:
    """Return the memory in use on GPUs by all processes, by their place, as far as it is known."""
    read = partial(read_use, gpus=gpus, with_holders=False)
    uses = (driver.ask(read) if gpus else None) or ()
    found = {use.gpu: use.used_bytes for use in uses}
    return {place: found[gpu] for place, gpu in enumerate(gpus) if gpu in found}
