"""Delays the ranks of a restart until the memory of this node's GPUs is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrun.host.gpu_use import GpuUse, read_use
from meshrun.host.machine import Gpu
from meshrun.host.nvml import load_nvml
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
        self._limits, self._note = plan.request.gpu_memory_wait, note
        self._nvml = None if self._limits is None else load_nvml()
        gpus = () if plan.device_type == "cpu" else plan.host.gpus
        if self._limits is not None and not (self._nvml and read_use(self._nvml, gpus)):
            note("--gpu-memory-wait has no effect: NVML reports no GPU of this launch")
        self._timer = reactor.call_at(None, self._check)
        self._deadline = reactor.call_at(None, self._give_up)
        self._note_timer = reactor.call_at(None, self._note_wait)
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
        if self._limits is None:
            then()
            return
        self._gpus, self._zygote, self._then = gpus, zygote, then
        self._deadline.restart(self._limits.timeout_s)
        self._note_timer.restart(_SOON_S)
        self._check()

    def cancel(self) -> None:
        """Stop waiting, without a restart."""
        for timer in (self._timer, self._deadline, self._note_timer):
            timer.cancel()

    def _uses_above_limit(self, *, with_holders: bool) -> list[GpuUse]:
        if self._nvml is None or self._limits is None:
            return []
        uses = read_use(self._nvml, self._gpus, with_holders=with_holders, zygote=self._zygote)
        return [use for use in uses if use.used_bytes > self._limits.limit_bytes]

    def _check(self) -> None:
        if not self._uses_above_limit(with_holders=False):
            self._finish()
            return
        self._timer.restart(_CHECK_EVERY_S)

    def _note_wait(self) -> None:
        assert self._limits is not None  # noqa: S101 - otherwise, there is no wait
        limit = f"until at most {size(self._limits.limit_bytes)} are in use"
        for use in self._uses_above_limit(with_holders=True):
            self._note(f"waiting {limit}, for up to {self._limits.timeout_s:g} s: {use}")

    def _give_up(self) -> None:
        assert self._limits is not None  # noqa: S101
        for use in self._uses_above_limit(with_holders=True):
            self._note(f"restarting after {self._limits.timeout_s:g} s although {use}")
        self._finish()

    def _finish(self) -> None:
        self.cancel()
        self._then()
