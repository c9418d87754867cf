"""The errors that NVIDIA's driver reports of GPUs while a launch runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from meshrun.host.machine import Gpu
from meshrun.host.xids import Xid, XidWatch
from meshrun.lifecycle.blame import Verdict
from meshrun.plan.plan import LaunchPlan

_OF_GPUS = re.compile(r"cuda|nccl|nvlink|gpu|device|ecc|accelerator", re.IGNORECASE)
"""In an exception: a GPU may be its cause."""


class GpuErrors:
    """XIDs since the launch began, for the report of a failure; none where nobody may read them."""

    def __init__(self, plan: LaunchPlan, log: Path = Path("/dev/kmsg")) -> None:
        self._watch = XidWatch(log) if plan.host.gpus else None
        self._seen: list[Xid] = []

    def why(self, verdict: Verdict, plan: LaunchPlan) -> str | None:
        """Return what was reported of the GPU of a rank of this node that failed, if anything."""
        if self._watch is None or verdict.asked_to_end:
            return None
        raised = verdict.raised
        if raised is not None and not _OF_GPUS.search(f"{raised.kind} {raised.message}"):
            return None
        found = self._of_rank(verdict.rank, plan)
        return ", ".join(dict.fromkeys(f"{xid} on GPU {gpu.label}" for xid, gpu in found)) or None

    def why_unfit(self, rank: int, plan: LaunchPlan) -> str | None:
        """Return which error makes a GPU of this rank useless for the next generation, if any."""
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
        """Let go of the kernel's log."""
        if self._watch is not None:
            self._watch.close()
