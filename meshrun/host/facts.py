"""What this machine is: detect_host() -> HostFacts, without importing torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from meshrun.host.cores import count_usable_cores
from meshrun.host.devices import accelerator_of_torch, count_accelerators
from meshrun.plan import HostFacts


def detect_host(environment: Mapping[str, str] | None = None) -> HostFacts:
    """Return the facts of this machine that a plan needs; starts nothing, changes nothing."""
    env = os.environ if environment is None else environment
    accelerator = accelerator_of_torch()
    return HostFacts(
        hostname=socket.gethostname(),
        usable_cores=count_usable_cores(),
        accelerator=accelerator,
        accelerator_count=count_accelerators(accelerator, env) if accelerator else 0,
    )
