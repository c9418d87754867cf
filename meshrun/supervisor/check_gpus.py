"""``--check-gpus``: reasons not to start ranks on the GPUs of this node, from their health."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec import Struct

from meshrun.errors import HostError
from meshrun.host.gpu_state import GpuHealth, Xid, read_health, read_xids
from meshrun.host.machine import Gpu
from meshrun.host.nvml import ask_driver, why_no_nvml
from meshrun.plan.plan import LaunchPlan
from meshrun.wording import count

_THROTTLES = {
    0x08: "its hardware has slowed it down",
    0x20: "it is too hot, and the driver has slowed it down",
    0x40: "it is too hot, and its hardware has slowed it down",
    0x80: "the power supply has slowed it down",
}
"""Throttle reasons of nvml.h that are problems; the others are normal: idle, load, settings."""
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})
"""XIDs that a bug in a program can cause."""
_RESET = "reset it with `nvidia-smi --gpu-reset -i {}`, or reboot the machine"


class GpuFinding(Struct, frozen=True):
    """A problem of a GPU, and what to do about it."""

    gpu: Gpu
    problem: str
    advice: str
    is_severe: bool = False
    """Whether no rank should run there."""

    def __str__(self) -> str:
        return f"GPU {self.gpu.label}: {self.problem}; {self.advice}"


def examine_gpus(plan: LaunchPlan, note: Callable[[str], None]) -> None:
    """Check the GPUs that ranks will use, and pass a line for each finding to ``note``.

    Raises:
        HostError: If one fails the check.
    """
    gpus = plan.used_gpus
    where = f"{os.uname().nodename}: " if plan.layout.nnodes > 1 else ""
    needs_none = plan.request.device == "cpu" and not gpus
    health = [] if needs_none else ask_driver(partial(read_health, gpus=gpus))
    if health is None:
        why, is_severe = ask_driver(lambda _: why_no_nvml())
        if is_severe:
            raise HostError(
                f"--check-gpus: the NVIDIA driver does not work: {why}",
                hint="reload it, or reboot the machine",
            )
    if not gpus:
        note(f"{where}--check-gpus: this launch uses no GPU of this machine")
        return
    if health is None:
        note(f"{where}--check-gpus: {why}; no GPU was checked")
        return
    xids = read_xids()
    if xids is None:
        note(f"{where}no permission to read the kernel log, so it was not searched for XIDs")
    findings = _find_problems(health, xids or ())
    for finding in findings:
        note(f"{where}{finding}")
    if (unfit := _unfit(findings, gpus)) is not None:
        raise unfit
    if not findings:
        note(f"{where}{count(len(gpus), 'GPU')} checked, no problems found")


def _find_problems(healths: Sequence[GpuHealth], xids: Sequence[Xid]) -> list[GpuFinding]:
    """Return the problems of GPUs, severe ones first."""
    found = [finding for health in healths for finding in _problems(health, xids)]
    return sorted(found, key=lambda finding: not finding.is_severe)


def _unfit(findings: Sequence[GpuFinding], gpus: Sequence[Gpu]) -> HostError | None:
    """Return the error for a launch on GPUs some of which are unfit, ``None`` if none is."""
    unfit = list(dict.fromkeys(each.gpu.label for each in findings if each.is_severe))
    if not unfit:
        return None
    return HostError(
        f"--check-gpus: {len(unfit)} of {count(len(gpus), 'GPU')} failed the check:"
        f" {', '.join(unfit)}",
        hint="leave them out with --gpus, or repair them as described above",
    )


def _problems(health: GpuHealth, xids: Sequence[Xid]) -> Iterator[GpuFinding]:
    if not health.answers:
        what, advice = "the driver cannot reach it", "see `nvidia-smi` and the kernel log"
        yield GpuFinding(health.gpu, what, advice, is_severe=True)
        return
    yield from _of_memory(health)
    yield from _of_speed(health)
    if health.use is not None and health.use.holders:
        holders = "; ".join(map(str, health.use.holders))
        what = f"other processes use its memory: {holders}"
        yield GpuFinding(health.gpu, what, "end them, or use other GPUs")
    yield from _in_log(health.gpu, xids)


def _of_memory(health: GpuHealth) -> Iterator[GpuFinding]:
    gpu, reset = health.gpu, _RESET.format(_number(health.gpu))
    if health.ecc_errors:
        what = f"{count(health.ecc_errors, 'uncorrected memory error')} since its last reset"
        yield GpuFinding(gpu, what, reset, is_severe=True)
    if health.remap_failed:
        what = "faulty rows of its memory could not be remapped"
        yield GpuFinding(gpu, what, "have it replaced", is_severe=True)
    if health.remap_pending:
        what = "faulty memory will be remapped at its next reset"
        yield GpuFinding(gpu, what, reset, is_severe=True)


def _of_speed(health: GpuHealth) -> Iterator[GpuFinding]:
    gpu, name = health.gpu, _number(health.gpu)
    for bit, what in _THROTTLES.items():
        if health.throttle_reasons & bit:
            yield GpuFinding(gpu, what, f"see `nvidia-smi -q -d PERFORMANCE -i {name}`")
    limit, default = health.power_limit_w, health.power_default_w
    if limit is not None and default is not None and limit < default:
        what = f"its power limit of {limit:g} W is below the default of {default:g} W"
        yield GpuFinding(gpu, what, f"raise it with `nvidia-smi -i {name} -pl {default:g}`")
    if 0 < health.nvlinks_up < health.nvlinks:
        what = f"{health.nvlinks - health.nvlinks_up} of {health.nvlinks} NVLinks are down"
        yield GpuFinding(gpu, what, f"see `nvidia-smi nvlink -s -i {name}`")


def _in_log(gpu: Gpu, xids: Sequence[Xid]) -> Iterator[GpuFinding]:
    own = [xid for xid in xids if xid.is_on(gpu.address)]
    times = Counter(xid.number for xid in own)
    for number, last in {xid.number: xid for xid in own}.items():
        what = f"{last}, {count(times[number], 'time')} in the kernel log since boot"
        is_program = number in _OF_PROGRAMS
        advice = "a program can cause this" if is_program else _RESET.format(_number(gpu))
        yield GpuFinding(gpu, what, advice)


def _number(gpu: Gpu) -> str:
    """Return the argument of ``nvidia-smi -i``; for a MIG instance, the number of its GPU."""
    return gpu.label if gpu.index is None else str(gpu.index)
