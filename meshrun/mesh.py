"""current_mesh(): the mesh of this process, resolved from the environment. torch comes lazily."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError
from meshrun.layout import solve_layout
from meshrun.spec import MeshSpec, parse_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WAYS_OUT = (
    "start the program with `meshrun --mesh dp=2,tp=4 ...`, or set MESHRUN_MESH=dp=2,tp=4"
    " under torchrun, or MESHRUN_MESH=dp=-1 to run it alone"
)


class _Installed:
    """The mesh of this process, and what must stay true for it to be the right one."""

    def __init__(self, mesh: DeviceMesh, world: Any) -> None:
        self.mesh = mesh
        self.world = world
        self.pid = os.getpid()
        self.slices: dict[tuple[str, ...], DeviceMesh] = {}


class _Process:
    """The one mesh of this process; a plain global, so that every thread sees the same."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed: _Installed | None = None


_process = _Process()


def current_mesh(*dims: str) -> DeviceMesh:
    """Return the mesh of this process, or the part of it along some dims.

    Under meshrun it is the mesh that was built before the program's first line. Under torchrun,
    or in a plain ``python``, with ``MESHRUN_MESH`` set it is built on first use, which every rank
    must then reach. The same arguments give the same object each time, in every thread.

    Args:
        *dims: Names of dims in the mesh's order; none for the whole mesh.

    Returns:
        A ``torch.distributed.device_mesh.DeviceMesh``.

    Raises:
        MeshError: If there is no mesh here, it is no longer valid, or it has no such dims.

    Example:
        ``tp = current_mesh("tp")`` is one-dimensional and holds this rank's ``tp`` group.
    """
    with _process.lock:
        if _process.installed is None:
            _process.installed = _build_from_environment()
        _check_valid(_process.installed)
        return _slice(_process.installed, dims) if dims else _process.installed.mesh


def has_mesh() -> bool:
    """Whether :func:`current_mesh` would return a mesh that exists already; never raises."""
    with _process.lock:
        if _process.installed is None:
            return False
        try:
            _check_valid(_process.installed)
        except MeshError:
            return False
        return True


def install_mesh(mesh: DeviceMesh) -> None:
    """Make ``mesh`` the one that :func:`current_mesh` returns in this process."""
    import torch.distributed as dist

    with _process.lock:
        _process.installed = _Installed(mesh, dist.group.WORLD)


def select_device(device_type: str, local_rank: int) -> str:
    """Select this rank's device and return the back ends that serve it and the host.

    With an accelerator the default group has gloo beside the accelerator's own back end, so that
    programs may ask for either.
    """
    import torch
    import torch.distributed as dist

    if device_type == "cpu":
        return "gloo"
    torch.get_device_module(device_type).set_device(local_rank)
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def _check_valid(installed: _Installed) -> None:
    import torch.distributed as dist

    if installed.pid != os.getpid():
        rank = os.environ.get("RANK", "?")
        raise MeshError(
            f"this process is a child of rank {rank} and has no process groups of its own",
            hint="use the mesh in the rank itself and pass plain numbers to its children",
        )
    if dist.group.WORLD is not installed.world:
        raise MeshError(
            "the process group of this mesh was destroyed",
            hint="call current_mesh() before destroy_process_group()",
        )


def _slice(installed: _Installed, dims: tuple[str, ...]) -> DeviceMesh:
    if dims in installed.slices:
        return installed.slices[dims]
    mesh = installed.mesh
    names = mesh.mesh_dim_names
    asked = ", ".join(f"`{dim}`" for dim in dims)
    if names is None:
        raise MeshError(
            f"the mesh has no dim names, so {asked} cannot be found",
            hint="name the dims: --mesh dp=2,tp=4, or --names dp,tp",
        )
    known = [names.index(dim) for dim in dims if dim in names]
    if len(known) < len(dims):
        has = ", ".join(f"`{name}`" for name in names)
        raise MeshError(f"the mesh has no dims {asked}", hint=f"it has {has}")
    if known != sorted(set(known)):
        ordered = ", ".join(f'"{names[index]}"' for index in sorted(set(known)))
        raise MeshError(
            f"dims {asked} are not in the mesh's order", hint=f"current_mesh({ordered})"
        )
    part = mesh if dims == names else mesh[dims]
    return installed.slices.setdefault(dims, part)


def _build_from_environment() -> _Installed:
    """Build the mesh that ``MESHRUN_MESH`` describes over the ranks the environment names."""
    text = os.environ.get("MESHRUN_MESH")
    if not text:
        raise MeshError("there is no mesh in this process", hint=_WAYS_OUT)
    if os.environ.get("MESHRUN_WORKER_PID", str(os.getpid())) != str(os.getpid()):
        raise MeshError(
            f"this process is a child of rank {os.environ.get('RANK', '?')} and has no mesh",
            hint="use the mesh in the rank itself and pass plain numbers to its children",
        )
    spec = _solve(parse_mesh(text))

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device_type = _device_type()
    if not dist.is_initialized():
        _init_process_group(device_type)
    if dist.get_world_size() != spec.known_size:
        raise MeshError(
            f"MESHRUN_MESH `{text}` needs {spec.known_size} ranks, and the process group has"
            f" {dist.get_world_size()}"
        )
    mesh = init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.mesh_dim_names)
    return _Installed(mesh, dist.group.WORLD)


def _solve(spec: MeshSpec) -> MeshSpec:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    solved = solve_layout(spec, nproc_per_node=world_size).mesh
    assert solved is not None  # noqa: S101 - a spec in gives a spec out
    return solved


def _device_type() -> str:
    """The device asked for, else the accelerator where each local rank has one, else the CPU."""
    asked = os.environ.get("MESHRUN_DEVICE")
    if asked and asked != "auto":
        return asked
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if accelerator is None or torch.accelerator.device_count() < workers:
        return "cpu"
    return str(accelerator.type)


def _init_process_group(device_type: str) -> None:
    import torch.distributed as dist

    backend = select_device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
