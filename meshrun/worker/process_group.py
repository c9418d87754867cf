"""A rank's process group and mesh, created before the program's first line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshrun.errors import InternalError
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import without_output
from meshrun.host.network import names_from_files_only
from meshrun.layout.environment import read_layout
from meshrun.mesh.build import build_mesh, set_timeout, this_process
from meshrun.mesh.current import select_device
from meshrun.mesh.late_settings import record_settings
from meshrun.plan.group_options import read_group_options
from meshrun.protocol.from_zygote import RankJoined
from meshrun.worker.reporter import Reporter

if TYPE_CHECKING:
    from torch.distributed import Store


def join_mesh(
    coordinate: tuple[int, ...],
    reporter: Reporter,
    *,
    purpose: str = "",
    timeout_s: float | None = None,
) -> None:
    """Set the device, join the process group and build the mesh that the environment describes.

    The mesh becomes the current one, for torch's own calls in the main thread too.

    Args:
        coordinate: This rank's coordinate in the plan.
        reporter: Reports that this rank has joined.
        purpose: Keeps the keys of another group than the program's apart in the store.
        timeout_s: Timeout of all groups; ``None`` for those in the environment.

    Raises:
        InternalError: If the mesh puts this rank elsewhere than the plan does.
    """
    import torch.distributed as dist

    env = os.environ
    options = read_group_options(os.environ)
    if timeout_s is not None:
        options = replace(options, timeouts_s=(("", timeout_s),))
    device_type = env[var.DEVICE]
    backend = select_device(device_type, int(env[var.LOCAL_RANK]))
    timeout = options.timeout("")
    hook = sys.excepthook
    store = connect_store(env, f"meshrun/{env[var.GENERATION]}{purpose}")
    if timeout is not None:  # as torch does with a store that it creates
        store.set_timeout(timeout)
    with _without_gloo_output(), _without_dns(env):
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=store,
            rank=int(env[var.RANK]),
            world_size=int(env[var.WORLD_SIZE]),
        )
        sys.excepthook = hook  # torch's prefixes each line with the rank, as the console does
        reporter.report(RankJoined)
        built = build_mesh(read_layout(env), device_type, options)
    set_timeout(dist.group.WORLD, timeout)
    found = tuple(built.mesh.get_coordinate() or ())
    if found != coordinate:
        raise InternalError(
            f"the plan puts rank {env[var.RANK]} at {coordinate}, but torch puts it at {found}"
        )
    _wait_for_all(store, int(env[var.WORLD_SIZE]))
    this_process.built = built
    built.mesh.__enter__()
    record_settings()


def _without_dns(env: Mapping[str, str]) -> AbstractContextManager[None]:
    """On one node, have gloo look up this machine's name only in the hosts file, not in DNS.

    gloo needs the name if no interface is set, as in gVisor, and falls back to loopback.
    """
    is_named = var.GLOO_INTERFACE in env or int(env[var.GROUP_WORLD_SIZE]) > 1
    return nullcontext() if is_named else names_from_files_only()


def _without_gloo_output() -> AbstractContextManager[None]:
    """Drop the line that torch 2.10's gloo prints to stdout for each rank of each group.

    If NCCL may print there too, nothing is dropped.
    """
    import torch

    is_printed = torch.__version__.startswith("2.10.") and "NCCL_DEBUG" not in os.environ
    return without_output(1) if is_printed else nullcontext()


def _wait_for_all(store: Store, world_size: int) -> None:
    """Return once every rank has built its mesh.

    A short program may end while another rank is still connecting its groups, which then fails
    because its peer is gone (gloo's ``connectFullMesh``, torch 2.13).
    """
    from torch.distributed.constants import default_pg_timeout

    if store.add("built", 1) == world_size:
        store.set("all built", "")
    store.wait(["all built"], default_pg_timeout)


def connect_store(env: Mapping[str, str], prefix: str) -> Store:
    """Return a connection to the launch's store, with a prefix for all keys."""
    import torch.distributed as dist

    with names_from_files_only():
        store = dist.TCPStore(
            env[var.MASTER_ADDR], int(env[var.MASTER_PORT]), is_master=False, wait_for_workers=False
        )
    return dist.PrefixStore(prefix, store)
