"""The variables that choose which devices a process sees: one home for their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Build = Literal["cuda", "hip", "xpu"]
"""What a torch was built for."""
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
XPU = "ZE_AFFINITY_MASK"
OUTSIDE_TORCH = ("ONEAPI_DEVICE_SELECTOR", "HABANA_VISIBLE_MODULES", "ASCEND_RT_VISIBLE_DEVICES")
"""Those of devices that torch does not know, or of layers below it; meshrun sets none of them."""


def visibility_variables(vendor: Build | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variable that chooses among the GPUs of a vendor, and those that must agree.

    HIP reads its own variable first, and then the one of CUDA, which some programs read.
    """
    if vendor == "xpu":
        return (XPU,)
    if vendor == "hip" or (vendor is None and env.get(HIP)):
        return HIP, CUDA
    return (CUDA,)


def listed_devices(names: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of a visibility variable, ``None`` if it is not set."""
    if not any(name in env for name in names):
        return None
    listed = next((env[name] for name in names if env.get(name)), "")
    return tuple(part.strip() for part in listed.split(",") if part.strip())
