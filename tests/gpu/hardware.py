"""The GPUs here and what runs on them, from NVML, without torch."""

from __future__ import annotations

from functools import lru_cache

import pytest

from meshrun.host.detect_host import detect_host
from meshrun.host.nvml import Handle, Nvml, load_nvml

_FREE_BYTES = 2**30
"""Memory that may be in use on a free GPU."""


@lru_cache
def count_gpus() -> int:
    """Return how many GPUs a launch here would use: with MIG, CUDA shows a process one instance."""
    here = detect_host()
    if any(gpu.mig_uuids for gpu in here.gpus):
        return 1
    return here.accelerator_count if here.accelerator == "cuda" else 0


@lru_cache
def nvml() -> Nvml | None:
    """Return NVIDIA's management library, ``None`` without a driver."""
    return load_nvml()


def needs(
    *,
    gpus: int = 1,
    reads_nvml: bool = False,
    whole: bool = False,
    free: bool = False,
    shared: bool = False,
) -> pytest.MarkDecorator:
    """Skip a test, with the reason, unless it can run here.

    Args:
        gpus: The number of GPUs.
        reads_nvml: Whether NVML must answer.
        whole: Whether the GPUs must not be divided by MIG.
        free: Whether no other process may use memory of the first GPU.
        shared: Whether several processes must be able to use a GPU.
    """
    reason = _why_not(gpus, reads_nvml=reads_nvml, whole=whole, free=free, shared=shared)
    return pytest.mark.skipif(bool(reason), reason=reason)


def _why_not(gpus: int, *, reads_nvml: bool, whole: bool, free: bool, shared: bool) -> str:
    if (found := count_gpus()) < gpus:
        built = detect_host().accelerator or "the CPU"
        return f"needs {gpus} x CUDA GPU; found {found}, and a torch that is built for {built}"
    if nvml() is None:
        return "needs NVML" if reads_nvml or free else ""
    if whole and any(gpu.mig_uuids for gpu in detect_host().gpus):
        return "needs GPUs that MIG does not divide"
    if free and used_bytes() > _FREE_BYTES:
        return f"needs a GPU that nothing else uses; {used_bytes() >> 20} MiB of it are in use"
    if shared and known().number("nvmlDeviceGetComputeMode", handle(0)):
        return "needs a GPU in the default compute mode, which several processes may use"
    return ""


def reads_kernel_log() -> bool:
    """Return whether launches can read the kernel's log."""
    try:
        with open("/dev/kmsg", "rb"):
            return True
    except OSError:
        return False


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
