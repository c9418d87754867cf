"""The facts about this machine: detect_host() -> HostFacts, without importing torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from meshrun.host.cores import count_usable_cores
from meshrun.host.devices import accelerator_of, build_of_torch
from meshrun.host.gpu_links import read_domain, read_gpu_links
from meshrun.host.gpus import visible_gpus
from meshrun.host.interfaces import networks_of_interfaces
from meshrun.host.machine import HostFacts
from meshrun.host.nics import add_nics
from meshrun.host.topology import read_topology
from meshrun.host.visibility import listed_devices, visibility_variables


def detect_host(
    environment: Mapping[str, str] | None = None,
    *,
    with_topology: bool = False,
    with_links: bool = False,
    with_nics: bool = False,
    with_domain: bool = False,
) -> HostFacts:
    """Return the facts about this machine that a plan needs, without side effects."""
    env = os.environ if environment is None else environment
    build = build_of_torch()
    vendor, gpus = visible_gpus(build, env)
    variables = visibility_variables(vendor, env)
    addresses = [gpu.address for gpu in gpus]
    return HostFacts(
        hostname=socket.gethostname(),
        usable_cores=count_usable_cores(),
        accelerator=accelerator_of(build),
        accelerator_count=len(gpus) if build else 0,
        visible_devices=listed_devices(variables, env),
        visibility=variables,
        gpus=add_nics(gpus) if with_nics else gpus,
        topology=read_topology(accelerators=addresses) if with_topology else None,
        networks=networks_of_interfaces() if with_nics and gpus else (),
        domain=read_domain(gpus) if with_domain else "",
        links=read_gpu_links(gpus) if with_links else None,
    )
