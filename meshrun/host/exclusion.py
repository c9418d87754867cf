"""Commands that make a scheduler leave a node out, for users to paste."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping


def node_name(env: Mapping[str, str]) -> str:
    """Return the scheduler's name of this machine, or its host name without a scheduler.

    ``NODE_NAME`` is the usual variable for ``spec.nodeName`` of Kubernetes' downward API.
    """
    if "KUBERNETES_SERVICE_HOST" in env and env.get("NODE_NAME"):
        return env["NODE_NAME"]
    return env.get("SLURMD_NODENAME") or os.uname().nodename


def how_to_exclude(name: str, env: Mapping[str, str]) -> str:
    """Return the command or option that leaves a node out from now on."""
    quoted = shlex.quote(name)
    if "KUBERNETES_SERVICE_HOST" in env:
        return f"kubectl taint nodes {quoted} meshrun=excluded:NoSchedule"
    if "SLURM_JOB_ID" in env:
        return f"sbatch --exclude={quoted}"
    return f"--exclude {quoted} with --hosts or --hostfile"
