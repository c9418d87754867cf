"""meshrun: launch a PyTorch script on every device and hand it a ready DeviceMesh.

Importing this package imports neither torch nor rich; each name below is loaded on first use.

PYTEST_DONT_REWRITE: ranks import it before pytest, which would warn that it cannot rewrite asserts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshrun.api.launch import launch as launch
    from meshrun.api.worker_group import GroupLost as GroupLost
    from meshrun.api.worker_group import WorkerGroup as WorkerGroup
    from meshrun.errors import MeshError as MeshError
    from meshrun.errors import MeshrunError as MeshrunError
    from meshrun.layout import Layout as Layout
    from meshrun.mesh.current import current_mesh as current_mesh
    from meshrun.mesh.current import has_mesh as has_mesh
    from meshrun.mesh.current import init_mesh as init_mesh
    from meshrun.mesh.current import use_mesh as use_mesh
    from meshrun.mesh.current_layout import current_layout as current_layout
    from meshrun.mesh.current_layout import data_shard as data_shard
    from meshrun.mesh.to_launcher import exclude_node as exclude_node
    from meshrun.mesh.to_launcher import heartbeat as heartbeat
    from meshrun.mesh.to_launcher import progress as progress
    from meshrun.protocol.result import LaunchResult as LaunchResult
    from meshrun.protocol.result import RankFailed as RankFailed

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

_HOME = {
    "GroupLost": "meshrun.api.worker_group",
    "WorkerGroup": "meshrun.api.worker_group",
    "LaunchResult": "meshrun.protocol.result",
    "Layout": "meshrun.layout",
    "MeshError": "meshrun.errors",
    "MeshrunError": "meshrun.errors",
    "RankFailed": "meshrun.protocol.result",
    "current_layout": "meshrun.mesh.current_layout",
    "current_mesh": "meshrun.mesh.current",
    "data_shard": "meshrun.mesh.current_layout",
    "exclude_node": "meshrun.mesh.to_launcher",
    "has_mesh": "meshrun.mesh.current",
    "heartbeat": "meshrun.mesh.to_launcher",
    "init_mesh": "meshrun.mesh.current",
    "progress": "meshrun.mesh.to_launcher",
    "use_mesh": "meshrun.mesh.current",
    "launch": "meshrun.api.launch",
    "load_ipython_extension": "meshrun.api.notebook",
    "unload_ipython_extension": "meshrun.api.notebook",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'meshrun' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
