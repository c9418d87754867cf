"""current_mesh(), has_mesh(), use_mesh() and init_mesh(). Imports torch lazily."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meshrun.errors import MeshError
from meshrun.host.own_variables import WORKER_PID
from meshrun.layout.spec import AnyMesh, mesh_text
from meshrun.mesh.build import BuiltMesh, not_in_a_child, slice_mesh, this_process
from meshrun.mesh.build_here import build_from_environment, build_here, layout_of
from meshrun.mesh.late_settings import warn_of_late_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
else:
    DeviceMesh = Any  # for `typing.get_type_hints()`, without importing torch

_entered = threading.local()


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
            this_process.built = build_here(layout, device, backend=backend, timeout=timeout)
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
    """Return the process's own mesh; build it first if the environment describes one."""
    if this_process.built is None:
        if os.environ.get(WORKER_PID, str(os.getpid())) != str(os.getpid()):
            raise not_in_a_child()
        this_process.built = build_from_environment(fallback)
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
