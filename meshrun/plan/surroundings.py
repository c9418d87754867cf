"""The facts about this machine and its scheduler on which the plan of a request depends."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here, for_caller, is_rank, with_starter
from meshrun.errors import HostError
from meshrun.host.detect_host import detect_host
from meshrun.host.entry_points import entry_points
from meshrun.host.machine import HostFacts
from meshrun.plan.device import COUNTED
from meshrun.plan.rank_program import first_path
from meshrun.plan.request import LaunchRequest
from meshrun.start import own_command

_TORCHS_OWN = ("mps", "mtia")
"""Built-in device types that only torch can count."""


def read_cluster_facts(request: LaunchRequest, *, is_child: bool = False) -> ClusterFacts | None:
    """Return the scheduler's facts; none in a rank, where they describe the launch around it.

    A child is a launcher for whose result a caller of ``launch()`` waits.

    Raises:
        UsageError: If a variable of the scheduler cannot be parsed.
    """
    if is_rank() or request.remote is not None:
        return None
    found = detect_here(collective=request.needs_scheduler)
    if found is None:
        return None
    return for_caller(found) if is_child else with_starter(found)


def read_host_facts(request: LaunchRequest, *, check_host: bool) -> HostFacts:
    """Return the facts that a launch needs, or a dry run, which does not ``check_host``."""
    # The plan of a CPU mesh rarely depends on this machine's GPUs.
    uses_gpus = request.mesh is None or request.device != "cpu" or request.virtual_local_rank
    is_near = request.numa_binding is not None or bool(request.intra_domain)
    counts = isinstance(request.nproc_per_node, str) or request.gpus is not None
    facts = detect_host(
        with_gpus=not check_host or uses_gpus or is_near or counts,
        with_topology=request.numa_binding is not None,
        with_links=not check_host,
        with_nics=not check_host or request.nic_affinity,
        with_domain=bool(request.intra_domain),
    )
    if (kind := depends_on_count(request)) is None:
        return facts
    return count_with_torch(facts, kind, request.own_preload, first_path(request.program))


def depends_on_count(request: LaunchRequest) -> str | None:
    """Return the device type that only torch can count, if the plan depends on the count.

    ``auto`` is the accelerator that torch finds, if any.
    """
    workers, device = request.nproc_per_node, request.device
    if isinstance(workers, str) and workers not in ("auto", "gpu"):
        return None if workers in COUNTED else workers
    infers = workers == "auto" or (workers is None and request.is_mesh_inferred)
    if request.mesh is not None and device != "auto":
        return device if infers and device not in COUNTED else None
    return "auto" if request.mesh is not None or infers else None


def count_with_torch(
    facts: HostFacts, kind: str, modules: Sequence[str], folder: str | None
) -> HostFacts:
    """Return the facts with the number of devices that only torch can count, which takes seconds.

    The kind ``auto`` is torch's accelerator, if none is known yet. ``modules``, which may be in the
    program's folder, are imported with torch, as they may add devices.
    """
    if kind == "auto" and (facts.accelerator_count or not _may_have_devices(kind, modules)):
        return facts
    if kind != "auto" and not _may_have_devices(kind, modules):
        return replace(facts, accelerator=kind, accelerator_count=0)
    found, count = _ask_torch(kind, modules, folder)
    return replace(facts, accelerator=found or facts.accelerator, accelerator_count=count)


def _may_have_devices(kind: str, modules: Sequence[str]) -> bool:
    """Return whether this torch may have devices that the launcher cannot count.

    torch imports modules that packages list as entry points in the group ``torch.backends``. Any
    module may add a type that was asked for, but an accelerator is looked for only in these.
    """
    if kind in _TORCHS_OWN or (modules and kind != "auto"):
        return True
    packages = {value.partition(":")[0] for value in entry_points("torch.backends").values()}
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        return bool(packages)
    return not packages.isdisjoint(modules)


def _ask_torch(kind: str, modules: Sequence[str], folder: str | None) -> tuple[str | None, int]:
    """Return (device type, number of devices), as counted by torch in a process of its own."""
    import subprocess

    done = subprocess.run(
        own_command("devices", kind, folder or "", *modules),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise HostError(
            f"torch could not count {'its' if kind == 'auto' else kind} devices: {last}",
            hint="use a number for --nproc-per-node, or --device cpu",
        )
    found, count = json.loads(done.stdout.splitlines()[-1])
    return found, count
