"""current_mesh(), has_mesh(), use_mesh() and init_mesh(). Imports torch lazily.

In a process that no launcher started, they build the mesh, from its environment or as specified.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError
from meshrun.host import rank_variables as var
from meshrun.host.own_variables import WORKER_PID
from meshrun.layout import Layout, parse_derived, solve_layout
from meshrun.layout.environment import read_number
from meshrun.layout.spec import AnyMesh, mesh_text, parse_mesh
from meshrun.mesh.build import (
    BuiltMesh,
    build_mesh,
    not_in_a_child,
    set_timeout,
    slice_mesh,
    this_process,
)
from meshrun.mesh.current_layout import current_layout
from meshrun.mesh.late_settings import warn_of_late_settings
from meshrun.mesh.scheduler_task import join_task, launch_environment
from meshrun.plan.group_options import GroupOptions, parse_group_options, read_group_options
from meshrun.wording import count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
else:
    DeviceMesh = Any  # for `typing.get_type_hints()`, without importing torch

_entered = threading.local()
_WAYS_OUT = (
    "launch the program with `meshrun --mesh dp=2,tp=4 ...`, set MESHRUN_MESH=dp=2,tp=4 under"
    " torchrun, srun or mpirun, or call current_mesh(fallback='dp=-1')"
)


def current_mesh(*dims: str, fallback: str | None = None) -> DeviceMesh:
    """Return the mesh of this process, or the part of it along some dims.

    Inside ``use_mesh(other)``, or torch's own ``with other:``, it is that mesh. Otherwise, under
    meshrun, it is the mesh built before the program's first line. Under torchrun, in a task of
    ``srun`` or ``mpirun``, or in a plain ``python`` with ``MESHRUN_MESH`` set, it is built on first
    use, which every rank must reach. The same arguments return the same object each time, in every
    thread.

    Args:
        *dims: Names of dims in the mesh's order, including flattened dims; or dims of one view,
            or the view's own name. None for the whole mesh.
        fallback: A spec such as ``dp=-1`` to build if neither process nor environment has one.

    Returns:
        A ``torch.distributed.device_mesh.DeviceMesh``.

    Raises:
        MeshError: If there is no mesh, it is no longer valid, or it has no such dims.

    Example:
        ``tp = current_mesh("tp")`` is one-dimensional and holds this rank's ``tp`` group.
    """
    with this_process.lock:
        warn_of_late_settings()
        other = _innermost()
        if other is not None:
            return _part_of(other, dims) if dims else other
        built = _own_mesh(fallback)
        return built.part(dims) if dims else built.mesh


def has_mesh() -> bool:
    """Return whether :func:`current_mesh` would return a mesh that exists; never raises."""
    with this_process.lock:
        if _innermost() is not None:
            return True
        if this_process.built is None:
            return False
        try:
            this_process.built.check_valid()
        except MeshError:
            return False
        return True


@contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Make ``mesh`` the current one for this thread while the block runs.

    It is torch's current mesh too: calls that take a ``device_mesh`` can omit it.
    """
    parts: dict[int, dict[tuple[str, ...], DeviceMesh]] = _entered.__dict__.setdefault("parts", {})
    outer = parts.get(id(mesh))
    parts.setdefault(id(mesh), {})
    try:
        with mesh:
            yield mesh
    finally:
        if outer is None:
            del parts[id(mesh)]


def init_mesh(
    spec: AnyMesh,
    names: str | None = None,
    *,
    device: str | None = None,
    flatten: Sequence[str] = (),
    views: Sequence[str] = (),
    backend: Sequence[str] = (),
    timeout: Sequence[str] = (),
) -> DeviceMesh:
    """Build the mesh of this process if no launcher has: under torchrun or srun, or in a notebook.

    All ranks must call it. Without a launcher, the world is one rank. A second call with the same
    spec returns the same mesh.

    Args:
        spec: As ``--mesh``, such as ``dp=-1,tp=2``, or ``{"dp": -1, "tp": 2}``, ``(2, 4)``.
        names: As ``--names``.
        device: As ``--device``; chosen if ``None``.
        flatten: As ``--flatten``.
        views: As ``--view``.
        backend: As ``--backend``.
        timeout: As ``--timeout``.

    Raises:
        SpecError: If a spec cannot be parsed.
        MeshError: If the world has a different size, or another mesh already exists.
    """
    spec = mesh_text(spec)
    with this_process.lock:
        layout = layout_of(spec, names, flatten, views)
        if this_process.built is None:
            options = parse_group_options(backend, timeout, ())
            this_process.built = _build(layout, device, options)
        this_process.built.check_valid()
        existing = this_process.built.layout
        requested, known = ({*each.flattens, *each.views} for each in (layout, existing))
        if existing.mesh != layout.mesh or not requested <= known:
            specs = " and ".join(f"`{text}`" for text in (spec, *flatten, *views))
            raise MeshError(
                f"init_mesh() was called with {specs}, but mesh `{existing.mesh}` already exists",
                hint="current_mesh() returns the existing mesh; use_mesh(mesh) replaces it"
                " temporarily",
            )
        return this_process.built.mesh


def _own_mesh(fallback: str | None) -> BuiltMesh:
    """Return the process's own mesh; build it first, from the environment or ``fallback``."""
    if this_process.built is None:
        if os.environ.get(WORKER_PID, str(os.getpid())) != str(os.getpid()):
            raise not_in_a_child()
        layout = current_layout()
        if layout.mesh is None:
            if fallback is None:
                raise MeshError("there is no mesh in this process", hint=_WAYS_OUT)
            layout = layout_of(fallback, None)
        device, options = os.environ.get(var.DEVICE), read_group_options(os.environ)
        this_process.built = _build(layout, device, options)
    this_process.built.check_valid()
    return this_process.built


def _innermost() -> DeviceMesh | None:
    """Return the mesh of this thread's innermost ``with mesh:``, unless it is the process's own."""
    module = sys.modules.get("torch.distributed.device_mesh")
    resources = getattr(module, "_mesh_resources", None)
    stack = getattr(resources, "mesh_stack", None)
    if not stack:
        return None
    innermost: DeviceMesh = stack[-1]
    built = this_process.built
    return None if built is not None and innermost is built.mesh else innermost


def _part_of(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    parts = getattr(_entered, "parts", {}).get(id(mesh))
    if parts is None:
        return slice_mesh(mesh, dims)
    if dims not in parts:
        parts[dims] = slice_mesh(mesh, dims)
    found: DeviceMesh = parts[dims]
    return found


# ---- building ------------------------------------------------------------------------------


def layout_of(
    spec: str, names: str | None, flatten: Sequence[str] = (), views: Sequence[str] = ()
) -> Layout:
    """Return a layout over ``WORLD_SIZE`` ranks; one rank if the environment has no such number."""
    world_size = read_number(launch_environment(), var.WORLD_SIZE, least=1) or 1
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
    workers = read_number(env, var.LOCAL_WORLD_SIZE, least=1) or 1
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
