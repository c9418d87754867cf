"""The mesh of this process: what was built, whether it is still valid, and its parts."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Installed:
    """A mesh that was built, and what must stay true for it to be the right one."""

    def __init__(self, mesh: DeviceMesh, world: Any) -> None:
        self.mesh = mesh
        self._world = world
        self._pid = os.getpid()
        self._parts: dict[tuple[str, ...], DeviceMesh] = {}

    def check_valid(self) -> None:
        """Check that the mesh may be used here.

        Raises:
            MeshError: In a child of the process that built it, and after its groups are gone.
        """
        import torch.distributed as dist

        if self._pid != os.getpid():
            raise not_in_a_child()
        if dist.group.WORLD is not self._world:
            raise MeshError(
                "the process group of this mesh was destroyed",
                hint="call current_mesh() before destroy_process_group()",
            )

    def part(self, dims: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh along ``dims``, the same object each time.

        Raises:
            MeshError: If there are no such dims, or not in this order.
        """
        if dims not in self._parts:
            self._parts[dims] = slice_mesh(self.mesh, dims)
        return self._parts[dims]


def slice_mesh(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh along some of its dims, in their order.

    Raises:
        MeshError: If the dims are not the mesh's, or are in another order.
    """
    names = mesh.mesh_dim_names
    asked = ", ".join(f"`{dim}`" for dim in dims)
    if names is None:
        raise MeshError(
            f"the mesh has no dim names, so {asked} cannot be found",
            hint="name the dims: --mesh dp=2,tp=4, or --names dp,tp",
        )
    if not set(dims) <= set(names):
        has = ", ".join(f"`{name}`" for name in names)
        raise MeshError(f"the mesh has no dims {asked}", hint=f"it has {has}")
    places = [names.index(dim) for dim in dims]
    if places != sorted(set(places)):
        ordered = ", ".join(f'"{names[place]}"' for place in sorted(set(places)))
        raise MeshError(
            f"dims {asked} are not in the mesh's order", hint=f"current_mesh({ordered})"
        )
    return mesh if dims == names else mesh[dims]


def not_in_a_child() -> MeshError:
    """Return the error of a process that a rank has started."""
    return MeshError(
        f"this process is a child of rank {os.environ.get('RANK', '?')} and has no process groups"
        " of its own",
        hint="use the mesh in the rank itself and pass plain numbers to its children;"
        " current_layout() works here",
    )


class Process:
    """The one mesh of this process; a plain global, so that every thread sees the same."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed: Installed | None = None


process = Process()
