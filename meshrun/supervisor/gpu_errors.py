"""Errors of GPUs that NVIDIA's driver reports during a launch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from meshrun.host.gpu_state import KERNEL_LOG, Xid, XidWatch
from meshrun.host.machine import Gpu
from meshrun.lifecycle.root_cause import FailedRank
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.rank_end import RankRaised

_GPU_WORDS = re.compile(
    r"cu(da|dnn|blas|fft|solver|sparse)|nccl|nvlink|gpu|device|ecc|accelerator", re.IGNORECASE
)


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
