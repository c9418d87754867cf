"""Which device the mesh is on. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches

from meshrun.errors import LayoutError, UsageError
from meshrun.wording import plural

TYPES = ("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia", "mlu", "musa", "xla")
"""Those that people use, and ``auto``; a package may bring any other."""
COUNTED = ("cpu", "cuda", "xpu")
"""The device types that a launcher can count, which does not import torch."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device type of the mesh, and why that."""

    type: str | None
    """As torch names it; ``None`` if the program chooses."""
    reason: str
    too_few: bool = False
    """Whether there are accelerators, too few of them, and so it is the CPU."""
    counted_later: bool = False
    """Whether nobody can count such devices until torch is imported."""


def device_name(device_type: str | None, index: int) -> str | None:
    """Return a torch device: ``cuda:3``, ``cpu``, or ``None`` if undecided."""
    return device_type if device_type in (None, "cpu") else f"{device_type}:{index}"


def check_device_type(name: str, what: str) -> str:
    """Return a device type that may be one: packages bring others than torch's own.

    Raises:
        UsageError: If it is a slip of the pen.
    """
    if name == "gpu":
        hint = "did you mean `cuda`? `auto` is the accelerator that torch finds"
        raise UsageError(f"{what}: unknown device type `gpu`", hint=hint)
    near = get_close_matches(name, TYPES, n=1, cutoff=0.7)
    if near and name.isalpha() and name not in TYPES:
        raise UsageError(f"{what}: unknown device type `{name}`", hint=f"did you mean `{near[0]}`?")
    return name


def only_torch_counts(
    workers: int | tuple[int, ...] | str | None, device: str, *, infers: bool, has_mesh: bool
) -> str | None:
    """Return a device type that only torch can count, if a plan depends on their number.

    Args:
        workers: What the user said of the workers of a node.
        device: What the user said of the device.
        infers: Whether the number of workers follows from the devices.
        has_mesh: Whether there is a mesh, which is on a device.

    Returns:
        The type; ``auto`` for the one that torch has, if it has any; or ``None``.
    """
    if isinstance(workers, str) and workers not in ("auto", "gpu"):
        return None if workers in COUNTED else workers
    infers = infers or workers == "auto"
    if has_mesh and device != "auto":
        return device if infers and device not in COUNTED else None
    return "auto" if has_mesh or infers else None


def choose_device(
    asked: str, workers: int, *, kind: str | None, count: int, check_host: bool
) -> DeviceChoice:
    """Return the device type of the mesh.

    Args:
        asked: What the user said, or ``auto``.
        workers: The most that a node has.
        kind: The accelerator that torch was built for, or ``None``.
        count: How many of them this machine has.
        check_host: Whether too few of them are an error.

    Raises:
        UsageError: If it is no device type, or one that is not here.
        LayoutError: If there are not enough.
    """
    if asked == "cpu":
        return DeviceChoice("cpu", "as requested")
    if asked == "auto":
        return _choose(workers, kind, count)
    if not asked.replace("_", "").isalpha():  # as torch names its devices
        raise UsageError(
            f"--device expects a device type such as `cuda`, found `{asked}`",
            hint="each rank uses the device of its local rank; to choose devices, use --gpus",
        )
    if not check_host:
        return DeviceChoice(asked, "as requested; not checked in a dry run")
    if asked not in (*COUNTED, kind):
        reason = "as requested; counted once torch is imported"
        return DeviceChoice(asked, reason, counted_later=True)
    if kind is not None and asked != kind:
        raise UsageError(
            f"--device {asked} is not available: this torch is built for {kind}",
            hint=f"use --device {kind} or --device cpu",
        )
    check_count(asked, count, workers)
    return DeviceChoice(asked, "as requested")


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
        raise LayoutError(
            f"{workers} worker{plural(workers)} need{'s' * (workers == 1)} {workers} {device_type}"
            f" device{plural(workers)}, but this machine has {count or 'none'}",
            hint=_device_hint(count, workers),
        )


def _device_hint(count: int, workers: int) -> str:
    if count == 0:
        return "use --device cpu to run the same mesh over gloo"
    nodes = math.ceil(workers / count)
    most = f"use at most {count} worker{plural(count)} per node"
    return f"{most}, such as with --nnodes {nodes}, or --device cpu"
