"""Counts devices that only torch knows, in a fork or in a process that is started for it.

    KIND [MODULE ...]

As a process it imports the modules and prints the device type and the number of devices as JSON;
``auto`` is the type that torch has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from meshrun.errors import UsageError
from meshrun.plan.device import check_count
from meshrun.zygote.fork_safety import ask_fork

_UNKNOWN = 254
_MOST = _UNKNOWN - 1


def main(_: object) -> None:
    """Answer the launcher, which does not import torch itself."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what modules print is not an answer
    kind, *modules = sys.argv[1:]
    for module in modules:
        import_module(module)
    found = _of_torch() if kind == "auto" else kind
    print(json.dumps([found, (_count(found) or 0) if found else 0]), file=answers, flush=True)


def check_devices(kind: str, workers: int, modules: Sequence[str]) -> None:
    """Check that torch has a device for each worker; a fork counts them, and may initialize them.

    Args:
        kind: The device type.
        workers: How many of them are needed.
        modules: Imported in the fork before.

    Raises:
        UsageError: If torch knows no such devices.
        LayoutError: If there are not enough.
    """

    def ask() -> int:
        for module in modules:
            import_module(module)
        count = _count(kind)
        return _UNKNOWN if count is None else min(count, _MOST)

    count = ask_fork(ask)
    if not 0 <= count <= _MOST:
        unknown = count == _UNKNOWN
        raise UsageError(
            f"--device {kind}: torch "
            + ("has no such device type" if unknown else "could not count these devices"),
            hint="import its package with --preload, unless torch does by an entry point"
            " `torch.backends`"
            if unknown
            else None,
        )
    check_count(kind, count, min(workers, _MOST))


def _count(kind: str) -> int | None:
    """Return how many devices of a type there are; ``None`` if torch knows no such type."""
    import torch

    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "device_count"):
        return None
    return int(module.device_count()) if module.is_available() else 0


def _of_torch() -> str | None:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else str(accelerator.type)
