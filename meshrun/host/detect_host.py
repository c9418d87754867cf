"""The facts about this machine: detect_host() -> HostFacts, without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from pathlib import Path

from meshrun.host.cores import count_cores, count_usable_cores, may_bind
from meshrun.host.gpus import read_domain, read_gpu_links, visible_gpus
from meshrun.host.interfaces import networks_of_interfaces
from meshrun.host.machine import HostFacts
from meshrun.host.nics import add_nics
from meshrun.host.topology import read_topology
from meshrun.host.visibility import Build, listed_devices, visibility_variables

_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=]*=\s*'", re.MULTILINE)
_BUILDS: tuple[Build, ...] = ("hip", "cuda", "xpu")


def detect_host(
    *,
    with_gpus: bool = True,
    with_topology: bool = False,
    with_links: bool = False,
    with_nics: bool = False,
    with_domain: bool = False,
) -> HostFacts:
    """Return the facts about this machine that a plan needs, without side effects."""
    env = os.environ
    build = _build_of_torch()
    vendor, gpus = visible_gpus(build, env) if with_gpus else (build, ())
    variables = visibility_variables(vendor, env)
    bound, cores = count_cores()
    return HostFacts(
        hostname=socket.gethostname(),
        usable_cores=count_usable_cores(),
        bound_cores=bound,
        cores=cores,
        may_bind=not with_topology or may_bind(),
        accelerator=_accelerator_of(build),
        accelerator_count=len(gpus) if build else 0,
        visible_devices=listed_devices(variables, env),
        visibility=variables,
        gpus=add_nics(gpus) if with_nics else gpus,
        topology=read_topology(accelerators=[gpu.numa_node for gpu in gpus])
        if with_topology
        else None,
        networks=networks_of_interfaces() if with_nics and gpus else (),
        domain=read_domain(gpus) if with_domain else "",
        links=read_gpu_links(gpus) if with_links else None,
    )


def _build_of_torch() -> Build | None:
    """Return the platform that the installed torch was built for, or ``None``.

    Source:
        ``torch/version.py``, written by torch's build: ``cuda: Optional[str] = '12.8'``.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return None
    built_for = {match.group(1) for match in _BUILD.finditer(text)}
    return next((build for build in _BUILDS if build in built_for), None)


def _accelerator_of(build: Build | None) -> str | None:
    """Return the torch device type of a build; ROCm's is ``cuda``."""
    return "cuda" if build == "hip" else build


def accelerator_of_torch() -> str | None:
    """Return the torch device type that the installed torch was built for, or ``None``."""
    return _accelerator_of(_build_of_torch())
