"""Devices added by packages outside torch, which only torch can count."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from msgspec.structs import replace

from meshrun.errors import HostError
from meshrun.host.entry_points import entry_points
from meshrun.host.machine import HostFacts
from meshrun.start import own_command

_TORCHS_OWN = ("mps", "mtia")
"""Built-in device types that only torch can count."""


def count_with_torch(
    facts: HostFacts, kind: str, modules: Sequence[str], folder: str | None
) -> HostFacts:
    """Return the facts with the number of devices that only torch can count, which takes seconds.

    The kind ``auto`` is torch's accelerator, if none is known yet. ``modules``, which may be in the
    program's folder, are imported with torch, as they may add devices.
    """
    if kind == "auto" and (facts.accelerator_count or not _may_have_devices(kind, modules)):
        return facts
    if kind != "auto" and not _may_have_devices(kind, modules):
        return replace(facts, accelerator=kind, accelerator_count=0)
    found, count = _ask_torch(kind, modules, folder)
    return replace(facts, accelerator=found or facts.accelerator, accelerator_count=count)


def _may_have_devices(kind: str, modules: Sequence[str]) -> bool:
    """Return whether this torch may have devices that the launcher cannot count.

    torch imports modules that packages list as entry points in the group ``torch.backends``. Any
    module may add a type that was asked for, but an accelerator is looked for only in these.
    """
    if kind in _TORCHS_OWN or (modules and kind != "auto"):
        return True
    packages = {value.partition(":")[0] for value in entry_points("torch.backends").values()}
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        return bool(packages)
    return not packages.isdisjoint(modules)


def _ask_torch(kind: str, modules: Sequence[str], folder: str | None) -> tuple[str | None, int]:
    """Return (device type, number of devices), as counted by torch in a process of its own."""
    import subprocess

    done = subprocess.run(
        own_command("devices", kind, folder or "", *modules),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise HostError(
            f"torch could not count {'its' if kind == 'auto' else kind} devices: {last}",
            hint="use a number for --nproc-per-node, or --device cpu",
        )
    found, count = json.loads(done.stdout.splitlines()[-1])
    return found, count
