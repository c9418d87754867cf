"""A layout -> torch's DeviceMesh. Collective: all ranks call."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError
from meshrun.groups import GroupOptions
from meshrun.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def build_mesh(layout: Layout, device_type: str, options: GroupOptions) -> DeviceMesh:
    """Build the mesh of ``layout`` over the default group, which must be there.

    Args:
        layout: Its mesh has as many ranks as the default group.
        device_type: Such as ``cuda``.
        options: Back ends, timeouts and options of the dims' groups.

    Raises:
        MeshError: If a back end does not know an option.
    """
    from torch.distributed.device_mesh import init_device_mesh

    assert layout.mesh is not None  # noqa: S101 - there is nothing to build otherwise
    overrides = {}
    for index, dim in enumerate(layout.dim_labels):
        override = _override(dim, device_type, options)
        if override is not None:
            overrides[layout.mesh_dim_names[index] if layout.mesh_dim_names else index] = override
    # The dictionary is emptied by the call (torch 2.13), so nobody else may hold it.
    more: dict[str, Any] = {"backend_override": overrides} if overrides else {}
    mesh: DeviceMesh = init_device_mesh(
        device_type, layout.sizes, mesh_dim_names=layout.mesh_dim_names, **more
    )
    # torch's dims do not inherit the timeout of the default group.
    for index, dim in enumerate(layout.dim_labels):
        set_timeout(mesh.get_group(index), options.timeout_s(dim))
    return mesh


def _override(dim: str, device_type: str, options: GroupOptions) -> Any:
    """Return what DeviceMesh takes for one dim: a back end, it and its options, or ``None``."""
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
            f"--pg-opt: the back end {backend} has no options here",
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
