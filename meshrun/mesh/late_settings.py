"""Warns about variables that the program changes after its process group has read them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from meshrun.host import rank_variables as var
from meshrun.host.visibility import CUDA, HIP

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "RCCL_")
_NAMES = (
    CUDA, HIP, "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


class _Recorded:
    """The variables when the process group was created; ``None`` after the warning."""

    values: dict[str, str] | None = None


def record_settings() -> None:
    """Record the current values of the variables."""
    _Recorded.values = _settings()


def warn_of_late_settings() -> None:
    """Warn once, on rank 0, which variables have changed since they were recorded."""
    before, now = _Recorded.values, _settings()
    if before is None or before == now:
        return
    _Recorded.values = None
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if os.environ.get(var.RANK, "0") == "0":
        verb, them = ("was", "it") if len(changed) == 1 else ("were", "them")
        note(
            f"{', '.join(changed)} {verb} changed after the process group was created, which had no"
            f" effect; set {them} before the launch, or use --mesh-init lazy"
        )


def note(text: str) -> None:
    """Print a note of meshrun's from within a rank, unless the program has closed its stderr."""
    with suppress(OSError, ValueError):
        print(f"meshrun: {text}", file=sys.stderr, flush=True)


def is_of_group(name: str, device: str) -> bool:
    """Return whether a process group for this type of device reads a variable on creation."""
    if device == "cpu" and name.startswith(("NCCL_", "TORCH_NCCL_", "RCCL_", "CUDA_", "HIP_")):
        return False
    return _is_of_group(name)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _is_of_group(name)}


def _is_of_group(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
