"""The GPUs of a launch: a check of their health, errors of the driver, and a wait for free memory.

With ``--check-gpus``, their health is a reason not to start ranks on the GPUs of this node.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from meshrun.errors import HostError
from meshrun.host.forked_call import ForkedCall
from meshrun.host.gpu_state import (
    KERNEL_LOG,
    GpuHealth,
    Xid,
    XidWatch,
    read_health,
    read_use,
    read_xids,
)
from meshrun.host.machine import Gpu
from meshrun.host.nvml import Driver, ask_driver, open_nvml, why_no_nvml
from meshrun.host.reactor import Reactor, Timer
from meshrun.lifecycle.root_cause import FailedRank
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.rank_end import RankRaised
from meshrun.wording import count, size

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
_GPU_WORDS = re.compile(
    r"cu(da|dnn|blas|fft|solver|sparse)|nccl|nvlink|gpu|device|ecc|accelerator", re.IGNORECASE
)
_CHECK_EVERY_S = 0.1
_SOON_S = 2.0
"""A shorter wait is not reported."""


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
    findings = [finding for each in health for finding in _problems(each, xids or ())]
    findings.sort(key=lambda finding: not finding.is_severe)
    for finding in findings:
        note(f"{where}{finding}")
    if unfit := list(dict.fromkeys(each.gpu.label for each in findings if each.is_severe)):
        raise HostError(
            f"--check-gpus: {len(unfit)} of {count(len(gpus), 'GPU')} failed the check:"
            f" {', '.join(unfit)}",
            hint="leave them out with --gpus, or repair them as described above",
        )
    if not findings:
        note(f"{where}{count(len(gpus), 'GPU')} checked, no problems found")


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


def may_be_of_gpu(raised: RankRaised) -> bool:
    """Return whether a GPU may have caused an exception."""
    return _GPU_WORDS.search(f"{raised.kind} {raised.message}") is not None


class GpuErrors:
    """XIDs since the launch began, for the report of a failure; none if they cannot be read."""

    def __init__(self, plan: LaunchPlan, log: Path = KERNEL_LOG) -> None:
        self._watch = XidWatch(log) if plan.host.gpus else None
        self._seen: list[Xid] = []

    def why(self, failed: FailedRank, plan: LaunchPlan) -> str | None:
        """Return the errors of the GPU of a failed rank of this node, if there are any."""
        if self._watch is None or failed.asked_to_end:
            return None
        if failed.raised is not None and not may_be_of_gpu(failed.raised):
            return None
        first: dict[tuple[int, str], Xid] = {}  # one fault may be logged for each multiprocessor
        for xid, gpu in self._of_rank(failed.rank, plan):
            first.setdefault((xid.number, gpu.label), xid)
        return ", ".join(f"{xid} on GPU {label}" for (_, label), xid in first.items()) or None

    def why_unfit(self, rank: int, plan: LaunchPlan) -> str | None:
        """Return the error that makes a GPU of this rank unusable for a restart, if any."""
        fatal = (
            f"{xid} on GPU {gpu.label}" for xid, gpu in self._of_rank(rank, plan) if xid.is_fatal
        )
        return next(fatal, None)

    def _of_rank(self, rank: int, plan: LaunchPlan) -> Iterator[tuple[Xid, Gpu]]:
        self._seen += self._watch.read() if self._watch is not None else ()
        own = plan.rank(rank).gpu
        gpus = plan.used_gpus if own is None else (own,)
        return ((xid, gpu) for xid in self._seen for gpu in gpus if xid.is_on(gpu.address))

    def close(self) -> None:
        """Close the kernel log."""
        if self._watch is not None:
            self._watch.close()


class GpuWait:
    """The wait before a restart: the driver frees the memory of killed ranks with a delay.

    Args:
        plan: The memory that may be in use, how long to wait, and the GPUs.
    """

    def __init__(self, plan: LaunchPlan, reactor: Reactor, note: Callable[[str], None]) -> None:
        self._limits, self._note, self._reactor = plan.request.gpu_memory_wait, note, reactor
        self._driver = Driver(note)
        gpus = () if plan.device_type == "cpu" else plan.host.gpus
        if self._limits is not None and self._driver.ask(partial(read_use, gpus=gpus)) == []:
            note("--gpu-memory-wait has no effect: NVML reports no GPU of this launch")
            self._limits = None
        self._timers: list[Timer] = []
        self._until_free: ForkedCall[None] | None = None

    def delay(self, gpus: Sequence[Gpu], zygote: int, then: Callable[[], None]) -> None:
        """Call ``then``, which starts ranks, once none of their GPUs uses too much memory."""
        limits = self._limits
        if limits is None or not gpus:
            then()
            return
        limit, most = size(limits.limit_bytes), f"{limits.timeout_s:g} s"

        def note_uses(text: str) -> None:
            uses = self._driver.ask(partial(read_use, gpus=gpus, roots=(os.getpid(), zygote)))
            if uses is None:
                self._note(f"{text} {self._driver.trouble}")
            for use in uses or ():
                if use.used_bytes > limits.limit_bytes:
                    self._note(f"{text} {use}")

        def time_out() -> None:
            note_uses(f"restarting after {most} although")
            finish()

        def finish() -> None:
            self.cancel()
            then()

        text = f"waiting up to {most} for GPU memory in use to drop to {limit}:"
        self._timers = [
            self._reactor.call_later(_SOON_S, partial(note_uses, text)),
            self._reactor.call_later(limits.timeout_s, time_out),
        ]
        try:
            self._until_free = ForkedCall(partial(_wait_until_free, gpus, limits.limit_bytes))
        except OSError as error:
            self._note(f"cannot start a process to wait for GPU memory: {error.strerror}")
            finish()
        else:
            self._reactor.add_reader(self._until_free, finish)

    def cancel(self) -> None:
        """Stop waiting, without a restart."""
        for timer in self._timers:
            timer.cancel()
        self._driver.close()
        self._reactor.drop(self._until_free)
        self._until_free = None


def _wait_until_free(gpus: Sequence[Gpu], limit_bytes: int) -> None:
    """Return once no GPU uses more memory, or without a driver; runs in a process of its own."""
    with open_nvml() as nvml:
        while any(use.used_bytes > limit_bytes for use in read_use(nvml, gpus, with_holders=False)):
            time.sleep(_CHECK_EVERY_S)  # the driver does not notify of memory
