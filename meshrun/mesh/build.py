"""A layout -> torch's DeviceMesh, its flattened dims and views. Collective: all ranks call it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError, UsageError
from meshrun.layout import Layout
from meshrun.layout.spec import MeshSpec
from meshrun.plan.group_options import GroupOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A mesh and what is derived from it; each by its name."""

    layout: Layout
    mesh: DeviceMesh
    flattened: dict[str, DeviceMesh] = field(default_factory=dict)
    """One-dimensional meshes over several dims."""
    views: dict[str, DeviceMesh] = field(default_factory=dict)
    """Other factorizations of the same ranks."""


def build_mesh(layout: Layout, device_type: str, options: GroupOptions) -> Built:
    """Build the mesh of ``layout`` over the default group, which must be there.

    Args:
        layout: Its mesh has as many ranks as the default group.
        device_type: Such as ``cuda``.
        options: Backends, timeouts and options of the dims' groups.

    Raises:
        UsageError: If torch does not know a backend.
        MeshError: If a backend does not know an option.
    """
    from torch.distributed.device_mesh import init_device_mesh

    assert layout.mesh is not None  # noqa: S101 - there is nothing to build otherwise
    check_registered(options.backend_names)
    overrides = {}
    for index, dim in enumerate(layout.dim_labels):
        override = _override(dim, device_type, options)
        if override is not None:
            overrides[layout.mesh_dim_names[index] if layout.mesh_dim_names else index] = override
    # The dictionary is emptied by the call (torch 2.13), so nobody else may hold it.
    more: dict[str, Any] = {"backend_override": overrides} if overrides else {}
    mesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=layout.mesh_dim_names, **more)
    built = Built(layout=layout, mesh=mesh)
    for flatten in layout.flattens:
        override = _override(flatten.name, device_type, options)
        more = {} if override is None else {"backend_override": override}
        # torch has no public name for it (2.13); torchtitan and accelerate call it too.
        built.flattened[flatten.name] = mesh[flatten.dims]._flatten(flatten.name, **more)
    for view in layout.views:
        built.views[view.name] = _build_view(layout, view.mesh, built, device_type, options)
    # torch's groups do not inherit the timeout of the default group.
    for index, dim in enumerate(layout.dim_labels):
        set_timeout(mesh.get_group(index), options.timeout_s(dim))
    for name, group in _derived_groups(built, layout.dim_labels):
        set_timeout(group, options.timeout_s(name))
    return built


def _build_view(
    layout: Layout, spec: MeshSpec, built: Built, device_type: str, options: GroupOptions
) -> DeviceMesh:
    """Build another factorization; a dim whose groups there are already shares them."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    there = {
        layout.axis(index).digits: built.mesh.get_group(index) for index in range(len(layout.sizes))
    }
    for name, group in _derived_groups(built, layout.dim_labels):
        there[layout.axis(name).digits] = group
    groups: list[ProcessGroup] = []
    for dim in spec.mesh_dim_names or ():
        digits = layout.axis(dim).digits
        if digits not in there or _override(dim, device_type, options) is not None:
            there[digits] = _new_group(layout, dim, device_type, options)
        groups.append(there[digits])
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=spec.mesh_dim_names)
    ranks = torch.arange(layout.world_size, dtype=torch.int).view(spec.sizes)
    return DeviceMesh.from_group(
        groups, device_type, mesh=ranks, mesh_dim_names=spec.mesh_dim_names
    )


def _derived_groups(built: Built, own: tuple[str, ...]) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield this rank's group of each dim that is not one of the mesh's own."""
    for name, mesh in built.flattened.items():
        yield name, mesh.get_group()
    for view in built.views.values():
        for dim in view.mesh_dim_names or ():
            if dim not in own:
                yield dim, view.get_group(dim)


def check_registered(names: Sequence[str]) -> None:
    """Check that torch has each backend by now, its own or a package's.

    Raises:
        UsageError: With one that it does not.
    """
    if not names:
        return
    import torch
    import torch.distributed as dist

    listed = (name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
    known = [name for name in listed if dist.is_backend_available(name)]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--backend: torch {torch.__version__} has no backend `{name}`; it has"
                f" {', '.join(known)}",
                hint="one of another package is there once that is imported: --preload MODULE, or"
                " --mesh-init lazy if the program imports it",
            )


def _new_group(layout: Layout, dim: str, device_type: str, options: GroupOptions) -> ProcessGroup:
    """Make every group of a dim, as all ranks must, and return this rank's."""
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
    """Return what DeviceMesh takes for one dim: a backend, it and its options, or ``None``."""
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
            hint="options such as is_high_priority_stream are NCCL's",
        )
    made = kind.Options()
    for name, value in settings:
        holder = made if hasattr(made, name) else made.config
        if not hasattr(holder, name):
            raise MeshError(f"--pg-opt: {backend} has no option `{name}`")
        setattr(holder, name, int(value))
    return made


def set_timeout(group: ProcessGroup, seconds: float | None) -> None:
    """Set the timeout of a group's collectives; nothing for ``None``."""
    if seconds is not None:
        from torch.distributed import distributed_c10d as c10d

        c10d._set_pg_timeout(timedelta(seconds=seconds), group)
