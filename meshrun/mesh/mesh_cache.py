"""The mesh of this process: what was built, whether it is still valid, and its parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError
from meshrun.mesh.build import Built

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshCache:
    """A mesh that was built, and what must stay true for it to be the right one."""

    def __init__(self, built: Built, world: Any) -> None:
        self.mesh = built.mesh
        self.layout = built.layout
        self._built = built
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

        Args:
            dims: Dims of the mesh in its order, joined dims among them; or dims of one view, or
                the view's name for all of these.

        Raises:
            MeshError: If there are no such dims, or not in this order.
        """
        if dims not in self._parts:
            self._parts[dims] = self._find(dims)
        return self._parts[dims]

    def _find(self, dims: tuple[str, ...]) -> DeviceMesh:
        flattened, views = self._built.flattened, self._built.views
        if len(dims) == 1 and dims[0] in {**flattened, **views}:
            return {**flattened, **views}[dims[0]]
        own = self.mesh.mesh_dim_names or ()
        of_views = [dim for view in views.values() for dim in view.mesh_dim_names or ()]
        known = tuple(dict.fromkeys([*own, *flattened, *of_views]))
        if unknown := [dim for dim in dims if dim not in known]:
            raise no_dims(unknown, known)
        for home in (self.mesh, *views.values()):
            if set(dims) <= set(home.mesh_dim_names or ()):
                return slice_mesh(home, dims)
        if set(dims) <= {*own, *flattened}:
            return _concatenate([flattened.get(dim) or self.mesh[dim] for dim in dims], dims)
        raise MeshError(
            f"dims {_quoted(dims)} do not all belong to one mesh",
            hint="pass dims of the mesh itself, or dims of one view",
        )


def _concatenate(parts: list[DeviceMesh], dims: tuple[str, ...]) -> DeviceMesh:
    """Return one mesh over dims of which some are joined ones; no group is made.

    Raises:
        MeshError: If two dims have ranks in common, or torch is too old for it.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not hasattr(DeviceMesh, "_concatenate"):
        raise MeshError(f"a mesh of {_quoted(dims)} requires torch 2.10 or newer")
    try:
        mesh: DeviceMesh = DeviceMesh._concatenate(parts)
    except RuntimeError as error:
        raise MeshError(f"dims {_quoted(dims)} have ranks in common") from error
    return mesh


def slice_mesh(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh along some of its dims, in their order.

    Raises:
        MeshError: If the dims are not the mesh's, or are in another order.
    """
    names = mesh.mesh_dim_names or ()
    if unknown := [dim for dim in dims if dim not in names]:
        raise no_dims(unknown, names)
    places = [names.index(dim) for dim in dims]
    if places != sorted(set(places)):
        ordered = ", ".join(f'"{names[place]}"' for place in sorted(set(places)))
        raise MeshError(
            f"dims {_quoted(dims)} are not in the mesh's order", hint=f"current_mesh({ordered})"
        )
    return mesh if dims == names else mesh[dims]


def no_dims(unknown: Sequence[str], known: Sequence[str]) -> MeshError:
    """Return the error of names that a mesh does not have."""
    if not known:
        return MeshError(
            f"the mesh has no dim names, so it has no {_quoted(unknown)}",
            hint="name the dims: --mesh dp=2,tp=4, or --names dp,tp",
        )
    dims = "dims" if len(unknown) > 1 else "dim"
    return MeshError(f"the mesh has no {dims} {_quoted(unknown)}", hint=f"it has {_quoted(known)}")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def not_in_a_child() -> MeshError:
    """Return the error of a process that a rank has started."""
    return MeshError(
        f"this process is a child of rank {os.environ.get('RANK', '?')} and has no process groups",
        hint="use the mesh in the rank itself and pass plain numbers to its children, or call"
        " current_layout() here",
    )


class Process:
    """The one mesh of this process; a plain global, so that every thread sees the same."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.mesh_cache: MeshCache | None = None


process = Process()
