"""Which accelerator torch was built for, and how many are visible, without importing torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=]*=\s*'", re.MULTILINE)


def accelerator_of_torch() -> str | None:
    """Return the torch device type that the installed torch was built for, or ``None``.

    Source:
        ``torch/version.py``, written by torch's build: ``cuda: Optional[str] = '12.8'``. A ROCm
        build fills ``hip`` and calls its devices ``cuda``.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    built_for = {match.group(1) for match in _BUILD.finditer(text)}
    if built_for & {"cuda", "hip"}:
        return "cuda"
    return "xpu" if "xpu" in built_for else None


def count_accelerators(kind: str, env: Mapping[str, str]) -> int:
    """Return how many accelerators of ``kind`` a process with ``env`` would see."""
    if kind == "cuda":
        amd = _count_amd()
        if amd:
            for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
                amd = count_visible(amd, env.get(name))
            return amd
        return count_visible(_count_nvidia(), env.get("CUDA_VISIBLE_DEVICES"))
    if kind == "xpu":
        return count_visible(_count_intel(), env.get("ZE_AFFINITY_MASK"))
    return 0


def count_visible(present: int, visible: str | None) -> int:
    """Return how many of ``present`` devices the text of a visibility variable lets through.

    The list ends at the first entry that names no device, and an empty text hides all (CUDA
    programming guide, "CUDA environment variables"). Entries that are not numbers are UUIDs.
    """
    if visible is None:
        return present
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < present):
            break
        count += 1
    return count if present else 0


def _count_nvidia() -> int:
    """NVML counts what this container may use; without NVML, the device nodes do."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value


def _count_amd() -> int:
    """Nodes of the KFD topology with SIMD units are GPUs (kernel, amdkfd)."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    found = 0
    for node in nodes:
        try:
            found += re.search(r"^simd_count [1-9]", node.read_text(), re.MULTILINE) is not None
        except OSError:
            continue
    return found


def _count_intel() -> int:
    """Render nodes of Intel's vendor id are GPUs that Level Zero can use."""
    found = 0
    for vendor in Path("/sys/class/drm").glob("renderD*/device/vendor"):
        try:
            found += vendor.read_text().strip() == "0x8086"
        except OSError:
            continue
    return found
