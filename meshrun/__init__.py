"""meshrun: launch a PyTorch script on every device and hand it a ready DeviceMesh.

Importing this package imports neither torch nor rich; each name below is loaded on first use.

PYTEST_DONT_REWRITE: ranks import it before pytest, which would warn that it cannot rewrite asserts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshrun.api.launch import launch
    from meshrun.api.worker_group import GroupLost, WorkerGroup
    from meshrun.errors import MeshError, MeshrunError
    from meshrun.layout import Layout
    from meshrun.mesh.current import current_mesh, has_mesh, init_mesh, use_mesh
    from meshrun.mesh.current_layout import current_layout, data_shard
    from meshrun.mesh.to_launcher import exclude_node, heartbeat, progress
    from meshrun.protocol.result import LaunchResult, RankFailed

__version__ = "0.1.0"
__all__ = [
    "GroupLost",
    "LaunchResult",
    "Layout",
    "MeshError",
    "MeshrunError",
    "RankFailed",
    "WorkerGroup",
    "current_layout",
    "current_mesh",
    "data_shard",
    "exclude_node",
    "has_mesh",
    "heartbeat",
    "init_mesh",
    "launch",
    "progress",
    "use_mesh",
]

_NAMES = {
    "api.launch": ("launch",),
    "api.notebook": ("load_ipython_extension", "unload_ipython_extension"),
    "api.worker_group": ("GroupLost", "WorkerGroup"),
    "errors": ("MeshError", "MeshrunError"),
    "layout": ("Layout",),
    "mesh.current": ("current_mesh", "has_mesh", "init_mesh", "use_mesh"),
    "mesh.current_layout": ("current_layout", "data_shard"),
    "mesh.to_launcher": ("exclude_node", "heartbeat", "progress"),
    "protocol.result": ("LaunchResult", "RankFailed"),
}
_HOME = {name: f"meshrun.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'meshrun' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
