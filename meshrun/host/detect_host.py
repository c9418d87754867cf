"""The facts about this machine: detect_host() -> HostFacts, without importing torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from meshrun.host.cores import count_usable_cores
from meshrun.host.devices import accelerator_of_torch, count_accelerators
from meshrun.host.machine import HostFacts
from meshrun.host.nvml import read_gpu_links
from meshrun.host.topology import read_topology


def detect_host(
    environment: Mapping[str, str] | None = None,
    *,
    with_topology: bool = False,
    with_links: bool = False,
) -> HostFacts:
    """Return the facts of this machine that a plan needs; starts nothing, changes nothing."""
    env = os.environ if environment is None else environment
    accelerator = accelerator_of_torch()
    return HostFacts(
        hostname=socket.gethostname(),
        usable_cores=count_usable_cores(),
        accelerator=accelerator,
        accelerator_count=count_accelerators(accelerator, env) if accelerator else 0,
        visible_devices=_visible_devices(env),
        topology=read_topology() if with_topology else None,
        links=read_gpu_links(env) if with_links and accelerator == "cuda" else None,
    )


def _visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """HIP's own variable counts before the one of CUDA that it reads too."""
    listed = env.get("HIP_VISIBLE_DEVICES") or env.get("CUDA_VISIBLE_DEVICES")
    if not listed:
        return None
    return tuple(part.strip() for part in listed.split(",") if part.strip())
