"""Holds back the ranks of a restart until the memory of this node's GPUs is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrun.host.gpu_use import GpuUse, read_use
from meshrun.host.machine import Gpu
from meshrun.host.nvml import load_nvml
from meshrun.host.reactor import Reactor
from meshrun.plan.plan import LaunchPlan
from meshrun.wording import size

_LOOK_EVERY_S = 0.1
_SOON_S = 2.0
"""A wait that is shorter than this is not worth a line."""


class GpuWait:
    """The wait before a restart: a driver frees the memory of killed ranks late.

    Args:
        plan: How much memory may be in use, how long to wait, and the GPUs there are.
        reactor: Where time passes, and signals are heard meanwhile.
        note: Shows people a line.
    """

    def __init__(self, plan: LaunchPlan, reactor: Reactor, note: Callable[[str], None]) -> None:
        self._asked, self._note = plan.request.gpu_memory_wait, note
        self._nvml = None if self._asked is None else load_nvml()
        gpus = () if plan.device_type == "cpu" else plan.host.gpus
        if self._asked is not None and not (self._nvml and read_use(self._nvml, gpus)):
            note("--gpu-memory-wait has no effect: NVML reports no GPU of this launch")
        self._timer = reactor.call_at(None, self._look)
        self._deadline = reactor.call_at(None, self._give_up)
        self._told = reactor.call_at(None, self._tell)
        self._gpus: Sequence[Gpu] = ()
        self._zygote = 0
        self._then: Callable[[], None] = lambda: None

    def hold(self, gpus: Sequence[Gpu], zygote: int, then: Callable[[], None]) -> None:
        """Call ``then`` once none of these GPUs has more memory in use than it may.

        Args:
            gpus: Those of the ranks that are to be started.
            zygote: The process that starts them.
            then: Starts them.
        """
        if self._asked is None:
            then()
            return
        self._gpus, self._zygote, self._then = gpus, zygote, then
        self._deadline.restart(self._asked.timeout_s)
        self._told.restart(_SOON_S)
        self._look()

    def cancel(self) -> None:
        """There will be no restart."""
        for timer in (self._timer, self._deadline, self._told):
            timer.cancel()

    def _over(self, *, by_whom: bool) -> list[GpuUse]:
        if self._nvml is None or self._asked is None:
            return []
        uses = read_use(self._nvml, self._gpus, by_whom=by_whom, zygote=self._zygote)
        return [use for use in uses if use.used_bytes > self._asked.limit_bytes]

    def _look(self) -> None:
        if not self._over(by_whom=False):
            self._end()
            return
        self._timer.restart(_LOOK_EVERY_S)

    def _tell(self) -> None:
        assert self._asked is not None  # noqa: S101 - or there is no wait
        limit = f"until at most {size(self._asked.limit_bytes)} are in use"
        for use in self._over(by_whom=True):
            self._note(f"waiting {limit}, for up to {self._asked.timeout_s:g} s: {use}")

    def _give_up(self) -> None:
        assert self._asked is not None  # noqa: S101
        for use in self._over(by_whom=True):
            self._note(f"restarting after {self._asked.timeout_s:g} s although {use}")
        self._end()

    def _end(self) -> None:
        self.cancel()
        self._then()
