"""A rank's process group and mesh, created before the program's first line.

The program's own first ``init_process_group()`` adopts the group, so that it runs unchanged; a call
after ``destroy_process_group()`` goes to torch, with keys of the store that are not used yet.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from msgspec.structs import replace

from meshrun.errors import InternalError, MeshError
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import without_output
from meshrun.host.network import names_from_files_only
from meshrun.layout.environment import read_layout
from meshrun.mesh.build import build_mesh, set_timeout, this_process
from meshrun.mesh.current import select_device
from meshrun.mesh.late_settings import note, record_settings
from meshrun.plan.group_options import read_group_options
from meshrun.protocol.zygote_messages import RankJoined
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


def adopt_process_group() -> None:
    """Have the program's first ``init_process_group()`` take over the existing group."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    ready = dist.group.WORLD
    torch_init = c10d.init_process_group
    adopted = False

    @wraps(torch_init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        nonlocal adopted
        if adopted or dist.group.WORLD is not ready:
            torch_init(*args, **kwargs)
            return
        requested = inspect.signature(torch_init).bind(*args, **kwargs).arguments
        _check_compatible(requested)
        adopted = True
        _take_over(requested)

    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def serve_env_rendezvous(env: Mapping[str, str], *, before: Callable[[], None]) -> None:
    """Have ``init_process_group()`` use the launch's store, with new keys for each call.

    torch's own handler uses the same keys for each call, so that a second group of a process
    hangs, and looks up the peer's name in DNS. It still serves ``dist.rendezvous()`` and RPC, which
    not every rank may call as often; unlike ``init_process_group()``, they pass no ``timeout``.

    ``before`` is called before each connection to a store.
    """
    # torch.distributed has a function of the module's name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    theirs: Callable[..., Iterator[Any]] = rendezvous._rendezvous_handlers["env"]
    launched = {name: env[name] for name in (var.MASTER_ADDR, var.MASTER_PORT, var.WORLD_SIZE)}
    calls = 0

    def handler(url: str, **kwargs: Any) -> Iterator[Any]:
        nonlocal calls
        before()
        elsewhere = any(os.environ.get(name) != value for name, value in launched.items())
        given = dict(parse_qsl(urlsplit(url).query))  # the arguments of init_process_group()
        rank = given.pop("rank", None) or os.environ.get(var.RANK)
        others = given.pop("world_size", env[var.WORLD_SIZE]) != env[var.WORLD_SIZE] or given
        if elsewhere or others or not rank or "timeout" not in kwargs:
            yield from theirs(url, **kwargs)
            return
        calls += 1
        store = connect_store(env, f"env/{env[var.GENERATION]}/{calls}")
        yield store, int(rank), int(env[var.WORLD_SIZE])
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")

    rendezvous._rendezvous_handlers["env"] = handler


def _check_compatible(requested: Mapping[str, Any]) -> None:
    import torch.distributed as dist

    for name, have in (("world_size", dist.get_world_size()), ("rank", dist.get_rank())):
        value = requested.get(name, -1)
        if value not in (None, -1, have):
            raise MeshError(
                f"init_process_group({name}={value}) conflicts with meshrun's process group,"
                f" which has {name}={have}",
                hint="remove the argument, or launch without --mesh",
            )
    backends = _backends(str(requested.get("backend") or ""))
    have_backends = _backends(str(dist.get_backend_config()))
    if backends - have_backends - {"undefined"}:
        raise MeshError(
            f"init_process_group(`{requested['backend']}`) conflicts with meshrun's process group,"
            f" which uses {' and '.join(sorted(have_backends))}",
            hint="remove the argument: --device and --backend determine the backend; or launch"
            " without --mesh",
        )


def _backends(text: str) -> set[str]:
    """Return the backends in ``nccl`` or in ``cpu:gloo,cuda:nccl``."""
    return {part.rpartition(":")[2].strip().lower() for part in text.split(",") if part.strip()}


def _take_over(requested: Mapping[str, Any]) -> None:
    """Apply the arguments to the existing group where possible, and warn about the others."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    timeout = requested.get("timeout")
    if isinstance(timeout, timedelta):
        for group in list(c10d._world.pg_map):
            set_timeout(group, timeout)
    backend = str(requested.get("backend") or "").lower()
    if backend and ":" not in backend:
        # get_backend() returns the name that the program gave.
        world = c10d._get_default_group()
        c10d._world.pg_map[world] = (backend, c10d._world.pg_map[world][1])
    ignored = [name for name in ("pg_options", "device_id") if requested.get(name) is not None]
    if ignored and dist.get_rank() == 0:
        note(
            f"ignored {' and '.join(ignored)} in init_process_group(): the process group was"
            " already created with the mesh"
        )
