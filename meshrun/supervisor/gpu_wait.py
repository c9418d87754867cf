"""Delays the ranks of a restart until the memory of this node's GPUs is free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from meshrun.host.forked_call import ForkedCall
from meshrun.host.gpu_state import read_use
from meshrun.host.machine import Gpu
from meshrun.host.nvml import Driver, open_nvml
from meshrun.host.reactor import Reactor, Timer
from meshrun.plan.plan import LaunchPlan
from meshrun.wording import size

_CHECK_EVERY_S = 0.1
_SOON_S = 2.0
"""A shorter wait is not reported."""


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
            for use in self._uses_over(limits.limit_bytes, gpus, zygote):
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

    def _uses_over(self, limit_bytes: int, gpus: Sequence[Gpu], zygote: int) -> list[str]:
        """Return which GPUs use more memory, and the processes that hold it."""
        uses = self._driver.ask(partial(read_use, gpus=gpus, roots=(os.getpid(), zygote)))
        if uses is None:
            return [self._driver.trouble]
        return [str(use) for use in uses if use.used_bytes > limit_bytes]


def _wait_until_free(gpus: Sequence[Gpu], limit_bytes: int) -> None:
    """Return once no GPU uses more memory, or without a driver; runs in a process of its own."""
    with open_nvml() as nvml:
        while any(use.used_bytes > limit_bytes for use in read_use(nvml, gpus, with_holders=False)):
            time.sleep(_CHECK_EVERY_S)  # the driver does not notify of memory
