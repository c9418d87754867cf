"""The health of GPUs as reported by NVIDIA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from msgspec import Struct

from meshrun.host.gpu_links import MOST_NVLINKS, nvlink_state
from meshrun.host.gpu_use import GpuUse, read_use
from meshrun.host.machine import Gpu
from meshrun.host.nvml import Handle, Nvml

_UNCORRECTED, _SINCE_RESET = ctypes.c_uint(1), ctypes.c_uint(0)


class GpuHealth(Struct, frozen=True, kw_only=True):
    """The health of one GPU; ``None`` or 0 for unsupported values, such as ECC's without ECC."""

    gpu: Gpu
    answers: bool = True
    """Whether the driver can reach it."""
    ecc_errors: int = 0
    """Uncorrected memory errors since its last reset."""
    remap_pending: bool = False
    """Whether faulty memory rows or pages will be replaced at its next reset."""
    remap_failed: bool = False
    """Whether replacing faulty memory rows has failed."""
    throttle_reasons: int = 0
    """Reasons for low clocks at present: bits ``nvmlClocksEventReason*`` of nvml.h."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    nvlinks: int = 0
    nvlinks_up: int = 0
    use: GpuUse | None = None


def read_health(nvml: Nvml | None, gpus: Sequence[Gpu]) -> list[GpuHealth] | None:
    """Return the health of each GPU, for a MIG instance that of its GPU; ``None`` without NVML."""
    return None if nvml is None else [_read(nvml, gpu) for gpu in gpus]


def _read(nvml: Nvml, gpu: Gpu) -> GpuHealth:
    handle = nvml.whole_gpu(gpu)
    if handle is None:
        return GpuHealth(gpu=gpu, answers=False)
    rows = nvml.numbers("nvmlDeviceGetRemappedRows", handle, 4) or (0, 0, 0, 0)
    pages = nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", handle) or 0
    which = ("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_RESET)
    errors = nvml.number(*which, kind=ctypes.c_ulonglong)
    links = [nvlink_state(nvml, handle, link) for link in range(MOST_NVLINKS)]
    return GpuHealth(
        gpu=gpu,
        ecc_errors=errors or 0,
        remap_pending=bool(rows[2] or pages),
        remap_failed=bool(rows[3]),
        throttle_reasons=_throttle_reasons(nvml, handle),
        power_limit_w=_watts(nvml.number("nvmlDeviceGetPowerManagementLimit", handle)),
        power_default_w=_watts(nvml.number("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        nvlinks=sum(state is not None for state in links),
        nvlinks_up=sum(map(bool, links)),
        use=next(iter(read_use(nvml, [gpu])), None),
    )


def _throttle_reasons(nvml: Nvml, gpu: Handle) -> int:
    for what in ("Event", "Throttle"):  # newer drivers use "Event"
        function = f"nvmlDeviceGetCurrentClocks{what}Reasons"
        if (found := nvml.number(function, gpu, kind=ctypes.c_ulonglong)) is not None:
            return found
    return 0


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
