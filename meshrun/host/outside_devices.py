"""Devices that packages outside torch bring, which only torch can count."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from meshrun.errors import HostError
from meshrun.host.entry_points import entry_points
from meshrun.host.machine import HostFacts
from meshrun.start import own_command

_TORCHS_OWN = ("mps", "mtia")
"""Device types of torch's own that only torch can count."""


def count_with_torch(facts: HostFacts, kind: str, modules: Sequence[str]) -> HostFacts:
    """Return the facts with the devices of a type that only torch can count, which takes seconds.

    Args:
        facts: What is known without torch.
        kind: The device type, or ``auto`` for the one that torch has, if none is known yet.
        modules: What is imported with torch, and may bring devices too.
    """
    if kind == "auto" and (facts.accelerator_count or not _brings_devices()):
        return facts
    if kind != "auto" and not _brings_devices(kind, modules):
        return replace(facts, accelerator=kind, accelerator_count=0)
    found, count = _ask_torch(kind, modules)
    return replace(facts, accelerator=found or facts.accelerator, accelerator_count=count)


def _brings_devices(kind: str = "", modules: Sequence[str] = ()) -> bool:
    """Whether this torch may have devices that the launcher cannot count.

    Packages name their module under the entry point ``torch.backends``, for torch to import it.
    """
    if kind in _TORCHS_OWN or modules:
        return True
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    return autoload and bool(entry_points("torch.backends"))


def _ask_torch(kind: str, modules: Sequence[str]) -> tuple[str | None, int]:
    """Return a device type and how many of them there are, asking torch in a process of its own.

    Args:
        kind: The device type, or ``auto`` for the one that torch has, if it has one.
        modules: Imported before.
    """
    import subprocess

    asked = subprocess.run(
        own_command("devices", kind, *modules),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise HostError(
            f"torch could not count {'its' if kind == 'auto' else kind} devices: {last}",
            hint="use a number for --nproc-per-node, or --device cpu",
        )
    found, count = json.loads(asked.stdout.splitlines()[-1])
    return found, count
