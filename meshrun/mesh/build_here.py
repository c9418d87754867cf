"""Builds a mesh in a running process from its environment."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

from meshrun.errors import MeshError
from meshrun.host import rank_variables as var
from meshrun.layout import Layout, parse_derived, solve_layout
from meshrun.layout.environment import read_count, read_number
from meshrun.layout.spec import parse_mesh
from meshrun.mesh.build import BuiltMesh, build_mesh, set_timeout, this_process
from meshrun.mesh.current_layout import current_layout
from meshrun.mesh.scheduler_task import join_task, launch_environment
from meshrun.plan.group_options import GroupOptions, parse_group_options, read_group_options
from meshrun.wording import count

_WAYS_OUT = (
    "launch the program with `meshrun --mesh dp=2,tp=4 ...`, set MESHRUN_MESH=dp=2,tp=4 under"
    " torchrun, srun or mpirun, or call current_mesh(fallback='dp=-1')"
)


def build_from_environment(fallback: str | None) -> BuiltMesh:
    """Build the mesh that ``MESHRUN_MESH`` describes, or ``fallback``; collective.

    Raises:
        MeshError: If both are missing, or the process group has another size.
    """
    layout = current_layout()
    if layout.mesh is None:
        if fallback is None:
            raise MeshError("there is no mesh in this process", hint=_WAYS_OUT)
        layout = layout_of(fallback, None)
    device, options = os.environ.get(var.DEVICE), read_group_options(os.environ)
    return _build(layout, device, options)


def build_here(
    layout: Layout, device: str | None, *, backend: Sequence[str], timeout: Sequence[str]
) -> BuiltMesh:
    """Build a mesh that the program specifies; collective."""
    return _build(layout, device, parse_group_options(backend, timeout, ()))


def layout_of(
    spec: str, names: str | None, flatten: Sequence[str] = (), views: Sequence[str] = ()
) -> Layout:
    """Return a layout over ``WORLD_SIZE`` ranks; one rank if the environment has no such number."""
    world_size = read_count(launch_environment(), var.WORLD_SIZE) or 1
    flattens, parsed = parse_derived(flatten, views)
    return solve_layout(
        parse_mesh(spec, names), nproc_per_node=world_size, flattens=flattens, views=parsed
    )


def select_device(device_type: str, index: int) -> str:
    """Select this rank's device and return the backends of the default group.

    With an accelerator, the group has gloo as well as the accelerator's own backend, so that
    programs may use tensors on either device.
    """
    import torch
    import torch.distributed as dist

    if device_type == "cpu":
        return "gloo"
    module = torch.get_device_module(device_type)
    select = getattr(module, "set_device", torch.accelerator.set_device_index)
    # Where a scheduler shows each rank only its own device, its index is 0.
    select(0 if module.device_count() == 1 else index)
    try:
        return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    except ValueError as error:
        raise MeshError(
            f"torch has no backend for groups of {device_type} devices",
            hint="the package that provides this device type must register one with"
            " `torch.distributed.Backend.register_backend(..., devices=[...])`; without --mesh, the"
            " program chooses the backend",
        ) from error


def _build(layout: Layout, device: str | None, options: GroupOptions) -> BuiltMesh:
    import torch.distributed as dist

    if not dist.is_initialized():
        join_task()
    device_type = _device_type(device)
    if not dist.is_initialized():
        _init_process_group(device_type, options)
    if dist.get_world_size() != layout.world_size:
        raise MeshError(
            f"mesh `{layout.mesh}` needs {count(layout.world_size, 'rank')}, but the process group"
            f" has {dist.get_world_size()}"
        )
    built = build_mesh(layout, device_type, options)
    set_timeout(dist.group.WORLD, options.timeout(""))
    return built


def _device_type(requested: str | None) -> str:
    """Return the requested type, or the accelerator if each local rank has one, or ``cpu``."""
    if requested and requested != "auto":
        return requested
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    env = launch_environment()
    workers = read_count(env, var.LOCAL_WORLD_SIZE) or 1
    count = torch.accelerator.device_count()
    if count == 1 and var.RANK in env:
        # `srun --gpus-per-task=1` shows each task only its own GPU.
        count = max(count, read_number(env, "SLURM_GPUS_ON_NODE") or 0)
    return str(accelerator.type) if accelerator is not None and count >= workers else "cpu"


def _init_process_group(device_type: str, options: GroupOptions) -> None:
    import torch.distributed as dist

    backend = select_device(device_type, read_number(os.environ, var.LOCAL_RANK) or 0)
    timeout = options.timeout("")
    if var.RANK in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    if device_type == "cpu":
        atexit.register(_end_process_group, dist.group.WORLD, os.getpid())


def _end_process_group(group: Any, pid: int) -> None:
    """End gloo's threads before Python finalizes, if the program succeeded and has not done so.

    A thread that still releases a tensor while Python finalizes aborts the process, in one of
    twenty runs. A failed program may have started collectives that no peer will ever join.
    """
    import torch.distributed as dist

    failed = getattr(sys, "last_value", None) is not None
    if not failed and os.getpid() == pid and dist.group.WORLD is group:
        this_process.built = None
        dist.destroy_process_group()
        gc.collect()
