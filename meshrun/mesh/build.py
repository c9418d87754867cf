"""Builds torch's DeviceMesh from a layout, with its flattened dims and views, and its parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError, UsageError
from meshrun.host import rank_variables as var
from meshrun.layout import Layout
from meshrun.layout.spec import MeshSpec
from meshrun.plan.group_options import GroupOptions
from meshrun.wording import quoted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class BuiltMesh:
    """A mesh with everything derived from it, and a check that it is still valid."""

    def __init__(self, layout: Layout, mesh: DeviceMesh) -> None:
        import torch.distributed as dist

        self.layout, self.mesh = layout, mesh
        self.flattened: dict[str, DeviceMesh] = {}
        """One-dimensional meshes over several dims, by name."""
        self.views: dict[str, DeviceMesh] = {}
        """Other factorizations of the same ranks, by name."""
        self._world, self._pid = dist.group.WORLD, os.getpid()
        self._parts: dict[tuple[str, ...], DeviceMesh] = {}

    def check_valid(self) -> None:
        """Check that the mesh may be used here.

        Raises:
            MeshError: In a child of the process that built it, or once its groups are destroyed.
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
            dims: Dims of the mesh in its order, including flattened dims; or dims of one view, or
                the view's name for all of them.

        Raises:
            MeshError: If the mesh has no such dims, or has them in another order.
        """
        if dims not in self._parts:
            self._parts[dims] = self._find(dims)
        return self._parts[dims]

    def _find(self, dims: tuple[str, ...]) -> DeviceMesh:
        flattened, views = self.flattened, self.views
        named = {**flattened, **views}
        if len(dims) == 1 and dims[0] in named:
            return named[dims[0]]
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
            f"dims {quoted(dims)} do not all belong to one mesh",
            hint="pass dims of the mesh itself, or dims of one view",
        )


class _ThisProcess:
    """The mesh of this process, which all threads share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.built: BuiltMesh | None = None
        """Set by ``join_mesh`` before a rank's program begins, or by the first ``current_mesh``."""


this_process = _ThisProcess()


def build_mesh(layout: Layout, device_type: str, options: GroupOptions) -> BuiltMesh:
    """Build the mesh of ``layout`` over the default group, which must exist; collective.

    Raises:
        UsageError: If torch does not know a backend.
        MeshError: If a backend does not know an option.
    """
    from torch.distributed.device_mesh import init_device_mesh

    assert layout.mesh is not None  # noqa: S101 - otherwise there is nothing to build
    check_registered(options.backend_names)
    overrides: dict[int | str, Any] = {
        index: override
        for index, dim in enumerate(layout.dim_labels)
        if (override := _override(dim, device_type, options)) is not None
    }
    mesh = init_device_mesh(
        device_type,
        layout.sizes,
        mesh_dim_names=layout.mesh_dim_names,
        backend_override=overrides,  # which the call empties (torch 2.13)
    )
    built = BuiltMesh(layout, mesh)
    for flatten in layout.flattens:
        override = _override(flatten.name, device_type, options)
        # There is no public method (torch 2.13); torchtitan and accelerate call this one too.
        part = mesh[flatten.dims]
        built.flattened[flatten.name] = part._flatten(flatten.name, backend_override=override)
    for view in layout.views:
        built.views[view.name] = _build_view(layout, view.mesh, built, device_type, options)
    # torch's groups do not inherit the timeout of the default group.
    for index, dim in enumerate(layout.dim_labels):
        set_timeout(mesh.get_group(index), options.timeout(dim))
    for name, group in _derived_groups(built, layout.dim_labels):
        set_timeout(group, options.timeout(name))
    return built


def _build_view(
    layout: Layout, spec: MeshSpec, built: BuiltMesh, device_type: str, options: GroupOptions
) -> DeviceMesh:
    """Build another factorization of the ranks, reusing groups that exist already."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    existing = {
        layout.axis(index).digits: built.mesh.get_group(index) for index in range(len(layout.sizes))
    }
    for name, group in _derived_groups(built, layout.dim_labels):
        existing[layout.axis(name).digits] = group
    groups: list[ProcessGroup] = []
    for dim in spec.mesh_dim_names or ():
        digits = layout.axis(dim).digits
        if digits not in existing or _override(dim, device_type, options) is not None:
            existing[digits] = _new_group(layout, dim, device_type, options)
        groups.append(existing[digits])
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=spec.mesh_dim_names)
    ranks = torch.arange(layout.world_size, dtype=torch.int).view(spec.sizes)
    return DeviceMesh.from_group(
        groups, device_type, mesh=ranks, mesh_dim_names=spec.mesh_dim_names
    )


def _derived_groups(built: BuiltMesh, own: tuple[str, ...]) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield this rank's group along each dim that is not one of the mesh's own."""
    for name, mesh in built.flattened.items():
        yield name, mesh.get_group()
    for view in built.views.values():
        for dim in view.mesh_dim_names or ():
            if dim not in own:
                yield dim, view.get_group(dim)


def check_registered(names: Sequence[str]) -> None:
    """Check that each backend is registered with torch, by torch itself or by a package.

    Raises:
        UsageError: If one is not.
    """
    if not names:
        return
    import torch
    import torch.distributed as dist

    if "fake" in names:
        import torch.testing._internal.distributed.fake_pg  # registers it
    listed = (name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
    known = [name for name in listed if dist.is_backend_available(name)]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--backend: torch {torch.__version__} has no backend `{name}`; it has"
                f" {', '.join(known)}",
                hint="for a backend of another package, import the package first: --preload MODULE,"
                " or --mesh-init lazy if the program imports it",
            )


def _new_group(layout: Layout, dim: str, device_type: str, options: GroupOptions) -> ProcessGroup:
    """Create all groups along a dim, as every rank must, and return this rank's."""
    import torch.distributed as dist

    override = _override(dim, device_type, options)
    backend, pg_options = override if isinstance(override, tuple) else (override, None)
    own, rank = None, dist.get_rank()
    for ranks in layout.groups(dim):
        group = dist.new_group(
            list(ranks), backend=backend, pg_options=pg_options, group_desc=f"mesh_{dim}"
        )
        if rank in ranks:
            own = group
    return own


def _override(dim: str, device_type: str, options: GroupOptions) -> Any:
    """Return DeviceMesh's ``backend_override`` for a dim: a backend, with or without options."""
    import torch.distributed as dist

    backend = options.backend(dim)
    settings = [(name, value) for of, name, value in options.settings if of == dim]
    if not settings:
        return backend
    backend = backend or dist.get_default_backend_for_device(device_type)
    return backend, _options_of(backend, settings)


def _options_of(backend: str, settings: list[tuple[str, str]]) -> Any:
    import torch.distributed as dist

    kind = getattr(dist, "ProcessGroupNCCL", None) if backend == "nccl" else None
    if kind is None:
        raise MeshError(
            f"--pg-opt: this build of torch has no options for the backend {backend}",
            hint="remove it: options such as is_high_priority_stream exist only for NCCL",
        )
    options = kind.Options()
    for name, value in settings:
        holder = options if hasattr(options, name) else options.config
        if not hasattr(holder, name):
            raise MeshError(f"--pg-opt: {backend} has no option `{name}`")
        setattr(holder, name, int(value))
    return options


def set_timeout(group: ProcessGroup, timeout: timedelta | None) -> None:
    """Set the timeout of a group's collectives, unless it is ``None``."""
    if timeout is not None:
        import torch.distributed as dist

        # set_timeout() is public since torch 2.14, where the private function warns.
        change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        change(timeout, group)


# ---- parts ----------------------------------------------------------------------------------


def _concatenate(parts: list[DeviceMesh], dims: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh over dims some of which are flattened ones, without creating groups."""
    from torch.distributed.device_mesh import DeviceMesh

    try:
        mesh: DeviceMesh = DeviceMesh._concatenate(parts)
    except RuntimeError as error:
        raise MeshError(f"dims {quoted(dims)} have ranks in common") from error
    return mesh


def slice_mesh(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh along some of its dims, in their order.

    Raises:
        MeshError: If the mesh has no such dims, or has them in another order.
    """
    names = mesh.mesh_dim_names or ()
    if unknown := [dim for dim in dims if dim not in names]:
        raise no_dims(unknown, names)
    places = [names.index(dim) for dim in dims]
    if places != sorted(set(places)):
        ordered = ", ".join(f'"{names[place]}"' for place in sorted(set(places)))
        raise MeshError(
            f"dims {quoted(dims)} are not in the mesh's order", hint=f"current_mesh({ordered})"
        )
    return mesh if dims == names else mesh[dims]


def no_dims(unknown: Sequence[str], known: Sequence[str]) -> MeshError:
    """Return the error for dims that a mesh does not have."""
    if not known:
        return MeshError(
            f"the mesh has no dim names, so it has no {quoted(unknown)}",
            hint="name the dims: --mesh dp=2,tp=4, or --names dp,tp",
        )
    dims = "dims" if len(unknown) > 1 else "dim"
    return MeshError(
        f"the mesh has no {dims} {quoted(unknown)}",
        hint=f"use {quoted(known)}, or launch with a different --mesh",
    )


def not_in_a_child() -> MeshError:
    """Return the error for a process that a rank has started."""
    rank = os.environ.get(var.RANK, "?")
    return MeshError(
        f"this process is a child of rank {rank} and has no process groups",
        hint="use the mesh in the rank itself and pass plain numbers to its children, or call"
        " current_layout() here",
    )
