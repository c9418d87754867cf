"""meshrun: launch a PyTorch script on every device and hand it a ready DeviceMesh.

Importing this package imports neither torch nor rich; each name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshrun.current import current_layout as current_layout
    from meshrun.errors import MeshError as MeshError
    from meshrun.errors import MeshrunError as MeshrunError
    from meshrun.launching import launch as launch
    from meshrun.layout import Layout as Layout
    from meshrun.mesh import current_mesh as current_mesh
    from meshrun.mesh import has_mesh as has_mesh
    from meshrun.mesh import init_mesh as init_mesh
    from meshrun.mesh import use_mesh as use_mesh
    from meshrun.pulse import heartbeat as heartbeat
    from meshrun.pulse import progress as progress
    from meshrun.result import LaunchResult as LaunchResult
    from meshrun.result import RankFailed as RankFailed
    from meshrun.sharding import data_shard as data_shard

__version__ = "0.1.0"
__all__ = [
    "LaunchResult",
    "Layout",
    "MeshError",
    "MeshrunError",
    "RankFailed",
    "current_layout",
    "current_mesh",
    "data_shard",
    "has_mesh",
    "heartbeat",
    "init_mesh",
    "launch",
    "progress",
    "use_mesh",
]

_HOME = {
    "LaunchResult": "meshrun.result",
    "Layout": "meshrun.layout",
    "MeshError": "meshrun.errors",
    "MeshrunError": "meshrun.errors",
    "RankFailed": "meshrun.result",
    "current_layout": "meshrun.current",
    "current_mesh": "meshrun.mesh",
    "data_shard": "meshrun.sharding",
    "has_mesh": "meshrun.mesh",
    "heartbeat": "meshrun.pulse",
    "init_mesh": "meshrun.mesh",
    "progress": "meshrun.pulse",
    "use_mesh": "meshrun.mesh",
    "launch": "meshrun.launching",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'meshrun' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
