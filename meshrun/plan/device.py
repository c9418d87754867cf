"""The choice of the mesh's device. Pure."""

from __future__ import annotations

import math
from difflib import get_close_matches

from msgspec import Struct

from meshrun.errors import LayoutError, UsageError
from meshrun.wording import plural

TYPES = ("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia", "mlu", "musa", "xla")
"""Common device types, and ``auto``; packages add others."""
COUNTED = ("cpu", "cuda", "xpu")
"""The device types that a launcher can count without importing torch."""


class DeviceChoice(Struct, frozen=True):
    """The device type of the mesh, and the reason for it."""

    type: str | None
    """torch's name of it; ``None`` if the program chooses."""
    reason: str
    too_few: bool = False
    """Whether it is the CPU because there are accelerators, but too few."""
    counted_later: bool = False
    """Whether such devices can be counted only once torch is imported."""


def device_name(device_type: str | None, index: int) -> str | None:
    """Return a torch device: ``cuda:3``, ``cpu``, or ``None`` if undecided."""
    return device_type if device_type in (None, "cpu") else f"{device_type}:{index}"


def check_device_type(name: str, what: str) -> str:
    """Return ``name`` unless it looks like a misspelled device type: packages add unknown ones.

    Raises:
        UsageError: If it looks misspelled.
    """
    if name == "gpu":
        hint = "did you mean `cuda`? `auto` is the accelerator that torch finds"
        raise UsageError(f"{what}: unknown device type `gpu`", hint=hint)
    near = get_close_matches(name, TYPES, n=1, cutoff=0.7)
    if near and name.isalpha() and name not in TYPES:
        raise UsageError(f"{what}: unknown device type `{name}`", hint=f"did you mean `{near[0]}`?")
    return name


def choose_device(
    device: str, workers: int, *, kind: str | None, count: int, check_host: bool
) -> DeviceChoice:
    """Return the device type of the mesh.

    ``workers`` is the number of workers on this node, ``kind`` the accelerator that torch was
    built for, and ``count`` how many of these this machine has: too few are an error only with
    ``check_host``.

    Raises:
        UsageError: If it is not a device type, or this torch does not support it.
        LayoutError: If there are too few devices.
    """
    if device == "cpu":
        return DeviceChoice("cpu", "as requested")
    if device == "auto":
        return _choose(workers, kind, count)
    if not device.replace("_", "").isalpha():  # as torch's device types are
        raise UsageError(
            f"--device expects a device type such as `cuda`, found `{device}`",
            hint="each rank uses the device of its local rank; to choose devices, use --gpus",
        )
    if not check_host:
        return DeviceChoice(device, "as requested; not checked in a dry run")
    if device not in (*COUNTED, kind):
        reason = "as requested; counted once torch is imported"
        return DeviceChoice(device, reason, counted_later=True)
    if kind is not None and device != kind:
        raise UsageError(
            f"--device {device} is not available: this torch is built for {kind}",
            hint=f"use --device {kind} or --device cpu",
        )
    check_count(device, count, workers)
    return DeviceChoice(device, "as requested")


def _choose(workers: int, kind: str | None, count: int) -> DeviceChoice:
    if kind is None or count == 0:
        return DeviceChoice("cpu", "no accelerator found")
    if count < workers:
        reason = f"{count} {kind} found for {workers} workers, not enough"
        return DeviceChoice("cpu", reason, too_few=True)
    return DeviceChoice(kind, f"{count} found")


def check_count(device_type: str, count: int, workers: int) -> None:
    """Check that each worker of a node has a device.

    Raises:
        LayoutError: If there are not enough.
    """
    if count < workers:
        hint = "use --device cpu to run the same mesh over gloo"
        if count:
            nodes, most = math.ceil(workers / count), f"{count} worker{plural(count)}"
            hint = f"use at most {most} per node, such as with --nnodes {nodes}, or --device cpu"
        raise LayoutError(
            f"{workers} worker{plural(workers)} need{'s' * (workers == 1)} {workers} {device_type}"
            f" device{plural(workers)}, but this machine has {count or 'none'}",
            hint=hint,
        )
