"""The GPUs here and what runs on them, from NVML, without torch."""

from __future__ import annotations

from functools import lru_cache

import pytest

from meshrun.host.detect_host import detect_host
from meshrun.host.nvml import Handle, Nvml, load_nvml


@lru_cache
def count_gpus() -> int:
    """Return how many GPUs a launch here would use."""
    here = detect_host()
    return here.accelerator_count if here.accelerator == "cuda" else 0


@lru_cache
def nvml() -> Nvml | None:
    """Return NVIDIA's management library, ``None`` without a driver."""
    return load_nvml()


def needs(*, gpus: int = 1, reads_nvml: bool = False) -> pytest.MarkDecorator:
    """Skip a test, with the reason, if there are too few GPUs."""
    found = count_gpus()
    if found < gpus:
        built = detect_host().accelerator or "the CPU"
        reason = f"needs {gpus} x CUDA GPU; found {found}, and a torch that is built for {built}"
        return pytest.mark.skipif(True, reason=reason)
    if reads_nvml and nvml() is None:
        return pytest.mark.skipif(True, reason="needs NVML")
    return pytest.mark.skipif(False, reason="")


def handle(gpu: int) -> Handle:
    """Return NVML's handle for a GPU."""
    found = [*known().gpus().values()][gpu]
    assert found is not None
    return found


def known() -> Nvml:
    """Return the library, in a test that needs it."""
    library = nvml()
    assert library is not None
    return library


def used_bytes(gpu: int = 0) -> int:
    """Return the memory in use on a GPU, by any process."""
    return known().used_bytes(handle(gpu)) or 0


def processes_on(gpu: int) -> set[int]:
    """Return the processes with a context on a GPU.

    NVML gives the host's process ids, which may differ from ours in a container.
    """
    return {each.pid for each in known().processes(handle(gpu))}


def uuid_of(gpu: int) -> str:
    """Return a GPU's name for ``CUDA_VISIBLE_DEVICES``."""
    return known().text("nvmlDeviceGetUUID", handle(gpu))


def mig_devices(gpu: int) -> list[str]:
    """Return the names of a GPU's MIG devices, none if MIG is off."""
    instances = known().mig_instances(handle(gpu))
    return [known().text("nvmlDeviceGetUUID", instance) for instance in instances]
