"""``--check-gpus``: checks the GPUs of this node before ranks are started on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from meshrun.errors import HostError
from meshrun.host.ask_driver import ask_driver
from meshrun.host.gpu_health import read_health
from meshrun.host.nvml import why_no_nvml
from meshrun.host.xids import read_xids
from meshrun.plan.gpu_check import find_gpu_problems, unfit_gpus
from meshrun.plan.plan import LaunchPlan
from meshrun.wording import count


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
    findings = find_gpu_problems(health, xids or ())
    for finding in findings:
        note(f"{where}{finding}")
    if (unfit := unfit_gpus(findings, gpus)) is not None:
        raise unfit
    if not findings:
        note(f"{where}{count(len(gpus), 'GPU')} checked, nothing found")
