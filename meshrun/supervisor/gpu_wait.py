"""Delays the ranks of a restart until the memory of this node's GPUs is free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from meshrun.host.aside import Aside
from meshrun.host.ask_driver import Driver
from meshrun.host.gpu_use import read_use
from meshrun.host.machine import Gpu
from meshrun.host.nvml import open_nvml
from meshrun.host.reactor import Reactor
from meshrun.plan.plan import LaunchPlan
from meshrun.wording import size

_CHECK_EVERY_S = 0.1
_SOON_S = 2.0
"""A shorter wait is not reported."""


class GpuWait:
    """The wait before a restart: the driver frees the memory of killed ranks with a delay.

    Args:
        plan: The memory that may be in use, how long to wait, and the GPUs.
        reactor: The loop's reactor, which handles signals meanwhile.
        note: Prints a line.
    """

    def __init__(self, plan: LaunchPlan, reactor: Reactor, note: Callable[[str], None]) -> None:
        self._limits, self._note, self._reactor = plan.request.gpu_memory_wait, note, reactor
        self._driver = Driver(note)
        gpus = () if plan.device_type == "cpu" else plan.host.gpus
        if self._limits is not None and self._driver.ask(partial(read_use, gpus=gpus)) == []:
            note("--gpu-memory-wait has no effect: NVML reports no GPU of this launch")
            self._limits = None
        self._deadline = reactor.call_at(None, self._give_up)
        self._note_timer = reactor.call_at(None, self._note_wait)
        self._until_free: Aside[None] | None = None
        self._gpus: Sequence[Gpu] = ()
        self._zygote = 0
        self._then: Callable[[], None] = lambda: None

    def hold(self, gpus: Sequence[Gpu], zygote: int, then: Callable[[], None]) -> None:
        """Call ``then`` once no GPU uses more memory than allowed.

        Args:
            gpus: The GPUs of the ranks to start.
            zygote: The process that starts them.
            then: Starts them.
        """
        if self._limits is None or not gpus:
            then()
            return
        self._gpus, self._zygote, self._then = gpus, zygote, then
        self._deadline.restart(self._limits.timeout_s)
        self._note_timer.restart(_SOON_S)
        try:
            self._until_free = Aside(partial(_wait_until_free, gpus, self._limits.limit_bytes))
        except OSError as error:
            self._note(f"cannot wait for GPU memory in a process of its own: {error.strerror}")
            self._finish()
        else:
            self._reactor.add_reader(self._until_free, self._finish)

    def cancel(self) -> None:
        """Stop waiting, without a restart."""
        self._deadline.cancel()
        self._note_timer.cancel()
        self._driver.close()
        self._reactor.drop(self._until_free)
        self._until_free = None

    def _why(self) -> list[str]:
        """Return what the wait is for."""
        assert self._limits is not None  # noqa: S101 - otherwise, there is no wait
        roots = os.getpid(), self._zygote
        uses = self._driver.ask(partial(read_use, gpus=self._gpus, roots=roots))
        if uses is None:
            return [self._driver.trouble]
        return [str(use) for use in uses if use.used_bytes > self._limits.limit_bytes]

    def _note_wait(self) -> None:
        assert self._limits is not None  # noqa: S101
        limit = f"until at most {size(self._limits.limit_bytes)} are in use"
        for why in self._why():
            self._note(f"waiting {limit}, for up to {self._limits.timeout_s:g} s: {why}")

    def _give_up(self) -> None:
        assert self._limits is not None  # noqa: S101
        for why in self._why():
            self._note(f"restarting after {self._limits.timeout_s:g} s although {why}")
        self._finish()

    def _finish(self) -> None:
        self.cancel()
        self._then()


def _wait_until_free(gpus: Sequence[Gpu], limit_bytes: int) -> None:
    """Return once no GPU uses more memory, or without a driver; runs in a process of its own."""
    with open_nvml() as nvml:
        while any(use.used_bytes > limit_bytes for use in read_use(nvml, gpus, with_holders=False)):
            time.sleep(_CHECK_EVERY_S)
