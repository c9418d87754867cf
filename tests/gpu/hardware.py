"""Which GPUs there are, found without torch, and what runs on them, from NVML."""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from typing import Any

import pytest

from meshrun.host.devices import accelerator_of_torch, count_accelerators


@lru_cache
def count_gpus() -> int:
    """How many GPUs a launch here would use."""
    return count_accelerators("cuda", os.environ) if accelerator_of_torch() == "cuda" else 0


@lru_cache
def nvml() -> Any:
    """The module ``pynvml``, initialized; ``None`` without it or a driver."""
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except Exception:  # as many kinds as there are drivers
        return None
    return module


def needs(*, gpus: int = 1, reads_nvml: bool = False) -> pytest.MarkDecorator:
    """Skip a test, with the reason, where there are fewer GPUs than it needs."""
    found = count_gpus()
    if found < gpus:
        built = accelerator_of_torch() or "the CPU"
        reason = f"needs {gpus} x CUDA GPU; found {found}, and a torch that is built for {built}"
        return pytest.mark.skipif(True, reason=reason)
    if reads_nvml and nvml() is None:
        return pytest.mark.skipif(True, reason="needs NVML and its module pynvml (nvidia-ml-py)")
    return pytest.mark.skipif(False, reason="")


def handle(gpu: int) -> Any:
    """NVML's handle of a GPU."""
    return nvml().nvmlDeviceGetHandleByIndex(gpu)


def used_bytes(gpu: int = 0) -> int:
    """Memory in use on a GPU, by whomever."""
    return int(nvml().nvmlDeviceGetMemoryInfo(handle(gpu)).used)


def processes_on(gpu: int) -> set[int]:
    """Who has a context on a GPU.

    NVML numbers processes as the machine does: in a container these may not be our numbers.
    """
    return {each.pid for each in nvml().nvmlDeviceGetComputeRunningProcesses(handle(gpu))}


def uuid_of(gpu: int) -> str:
    """A GPU's name for ``CUDA_VISIBLE_DEVICES``."""
    found = nvml().nvmlDeviceGetUUID(handle(gpu))
    return found.decode() if isinstance(found, bytes) else str(found)


def mig_devices(gpu: int) -> list[str]:
    """The names of a GPU's MIG devices; none where that mode is off."""
    module, found = nvml(), []
    try:
        for index in range(module.nvmlDeviceGetMaxMigDeviceCount(handle(gpu))):
            device = module.nvmlDeviceGetMigDeviceHandleByIndex(handle(gpu), index)
            found.append(module.nvmlDeviceGetUUID(device))
    except module.NVMLError:
        pass
    return found
