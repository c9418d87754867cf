"""current_layout() and data_shard(): where this rank is, and what data it reads. No torch."""

from __future__ import annotations

import os

from meshrun.errors import LayoutError, MeshError, UsageError
from meshrun.host.own_variables import DATA_DIMS
from meshrun.layout import Layout
from meshrun.layout.axes import rest_of
from meshrun.layout.environment import not_a_launch, read_layout
from meshrun.mesh.scheduler_task import launch_environment
from meshrun.wording import quoted

_DATA_DIMS = ("dp", "data", "batch", "fsdp", "replicate", "shard", "ddp", "hsdp")
_DATA_PREFIX = "dp_"


def current_layout() -> Layout:
    """Return the place of every rank of this launch; needs no torch and no process group.

    It works in a rank, in any child of a rank, under torchrun, in a task of ``srun`` or ``mpirun``,
    and in a plain ``python``, which is a launch of one rank. ``generation`` is the number of the
    generation; ``own_rank`` is the rank of this process, or of the rank that started it.

    Raises:
        MeshError: If the environment contradicts itself.
    """
    try:
        env = launch_environment()
    except UsageError as error:
        raise not_a_launch(error) from error
    return read_layout(env)


def data_shard(*dims: str | int) -> tuple[int, int]:
    """Return which part of the data this rank reads, and the number of parts.

    It needs no torch and no process group, and works in loader workers. Ranks that differ
    only in other dims, such as ``tp``, read the same part.

    Args:
        *dims: The dims that split the batch, slowest first; flattened dims and dims of views
            too. By default those in ``MESHRUN_DATA_DIMS``, joined by commas, else the mesh's dims
            named ``dp``, ``dp_*``, ``data``, ``batch``, ``fsdp``, ``replicate``, ``shard``,
            ``ddp`` or ``hsdp``.

    Returns:
        (part, number of parts), for the ``rank`` and ``num_replicas`` of a sampler. Without a mesh,
        each rank reads its own part; if no dim splits the data, the result is (0, 1).

    Raises:
        MeshError: If the environment contradicts itself, or the mesh's dims have no names to
            choose by.
        LayoutError: If there is no such dim, or dims overlap.

    Example:
        ``DistributedSampler(data, num_replicas=parts, rank=part)`` after
        ``part, parts = data_shard()``.
    """
    layout = current_layout()
    if layout.own_rank is None:
        raise MeshError("the environment does not define this process's rank", hint="set RANK")
    if layout.mesh is None and not dims:
        return layout.own_rank, layout.world_size
    chosen = dims or _default_dims(layout)
    axes = tuple(layout.axis(dim) for dim in chosen)
    if len(set(chosen)) < len(chosen) or rest_of(layout.world_size, axes) is None:
        raise LayoutError(
            f"data dims {quoted(chosen)} overlap", hint="pass dims that do not overlap"
        )
    part, parts = 0, 1
    for dim in chosen:
        size = layout.size(dim)
        part, parts = part * size + layout.dim_rank(dim), parts * size
    return part, parts


def _default_dims(layout: Layout) -> tuple[str, ...]:
    if text := os.environ.get(DATA_DIMS):
        return tuple(dim.strip() for dim in text.split(",") if dim.strip())
    names = layout.mesh_dim_names
    if names is None:
        raise MeshError(
            f"cannot tell which dims of mesh `{layout.mesh}` split the data: they have no names",
            hint="name them, as in --mesh dp=2,tp=4, or pass their indices: data_shard(0)",
        )
    return tuple(name for name in names if name in _DATA_DIMS or name.startswith(_DATA_PREFIX))
