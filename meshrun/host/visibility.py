"""The variables that determine which devices a process sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Build = Literal["cuda", "hip", "xpu"]
"""The platform that a torch was built for."""
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
XPU = "ZE_AFFINITY_MASK"
OUTSIDE_TORCH = ("ONEAPI_DEVICE_SELECTOR", "HABANA_VISIBLE_MODULES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables of devices unknown to torch, or of layers below it; meshrun sets none of them."""


def visibility_variables(vendor: Build | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variable that selects GPUs of a vendor, and others that must agree with it.

    HIP reads its own variable first, then CUDA's; some programs read only CUDA's.
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
