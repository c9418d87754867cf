"""Counts devices that only torch knows, in a fork or in a process of its own.

    KIND FOLDER [MODULE ...]

The process imports the modules, which may be in the program's folder, and prints the device type
and the number of devices as JSON; ``auto`` selects torch's current accelerator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from meshrun.errors import UsageError
from meshrun.plan.device import check_count
from meshrun.worker.imports import holds, on_path
from meshrun.zygote.fork_safety import call_in_fork

_UNKNOWN = 254
"""The exit code of a fork whose torch does not know the device type."""
_MOST = _UNKNOWN - 1


def main(_: object) -> None:
    """Count devices for the launcher, which does not import torch itself."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep what modules print out of the answer
    kind, folder, *modules = sys.argv[1:]
    with on_path(folder if holds(folder, modules) else None):
        for module in modules:
            import_module(module)
    found: str | None = kind
    if kind == "auto":
        import torch

        accelerator = torch.accelerator.current_accelerator()
        found = None if accelerator is None else str(accelerator.type)
    print(json.dumps([found, (_count(found) or 0) if found else 0]), file=answers, flush=True)


def check_devices(kind: str, workers: int, modules: Sequence[str]) -> None:
    """Check that torch has a device for each worker.

    A fork that imports ``modules`` counts them, because counting may initialize them.

    Raises:
        UsageError: If torch does not know the device type, or counting fails.
        LayoutError: If there are too few.
    """

    def count_up_to_most() -> int:
        for module in modules:
            import_module(module)
        count = _count(kind)
        return _UNKNOWN if count is None else min(count, _MOST)

    count = call_in_fork(count_up_to_most)
    if not 0 <= count <= _MOST:
        unknown = count == _UNKNOWN
        raise UsageError(
            f"--device {kind}: torch "
            + ("has no such device type" if unknown else "could not count these devices"),
            hint="import its package with --preload, unless torch does so by an entry point"
            " `torch.backends`"
            if unknown
            else None,
        )
    check_count(kind, count, min(workers, _MOST))


def _count(kind: str) -> int | None:
    """Return the number of devices of a type; ``None`` if torch does not know the type."""
    import torch

    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "device_count"):
        return None
    return int(module.device_count()) if module.is_available() else 0
