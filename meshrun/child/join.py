"""A rank's process group and mesh, made before the program's first line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshrun.child.names import names_from_files_only
from meshrun.child.reporter import Reporter
from meshrun.errors import InternalError
from meshrun.mesh import install_mesh, select_device
from meshrun.spec import parse_mesh

if TYPE_CHECKING:
    from torch.distributed import Store


def join_mesh(env: Mapping[str, str], coordinate: tuple[int, ...], reporter: Reporter) -> None:
    """Set the device, join the process group and build the mesh that ``env`` describes.

    Args:
        env: This rank's environment, with ``MESHRUN_MESH`` in it.
        coordinate: Where the plan puts this rank; the mesh must agree.
        reporter: Told when the group stands.

    Raises:
        InternalError: If the mesh puts this rank elsewhere than the plan does.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    spec = parse_mesh(env["MESHRUN_MESH"])
    device_type = env["MESHRUN_DEVICE"]
    backend = select_device(device_type, int(env["LOCAL_RANK"]))
    hook = sys.excepthook
    dist.init_process_group(
        backend,
        store=connect_store(env, f"meshrun/{env['MESHRUN_GENERATION']}"),
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
    )
    sys.excepthook = hook  # torch's prefixes each line with the rank, and so does the console
    reporter.joined()
    mesh = init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.mesh_dim_names)
    found = tuple(mesh.get_coordinate() or ())
    if found != coordinate:
        raise InternalError(f"rank {env['RANK']} is planned at {coordinate}, torch says {found}")
    install_mesh(mesh)


def connect_store(env: Mapping[str, str], prefix: str) -> Store:
    """Return the launch's store, seen through a prefix of its own."""
    import torch.distributed as dist

    with names_from_files_only():
        store = dist.TCPStore(
            env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
    return dist.PrefixStore(prefix, store)


def serve_store(port: int, listen_fd: int) -> Store:
    """Serve the launch's store on a socket that listens already; it owns the descriptor."""
    import torch.distributed as dist

    with names_from_files_only():
        return dist.TCPStore(
            "127.0.0.1",  # the descriptor decides; torch wants an address all the same
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
