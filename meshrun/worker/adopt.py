"""Lets programs that call init_process_group() themselves run unchanged with a ready mesh.

The first call adopts the existing group; a call after ``destroy_process_group()`` goes to torch,
with keys of the store that have not been used yet.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from meshrun.errors import MeshError
from meshrun.host import rank_variables as var
from meshrun.mesh.build import set_timeout
from meshrun.mesh.late_settings import note
from meshrun.worker.process_group import connect_store


def adopt_process_group() -> None:
    """Have the program's first ``init_process_group()`` take over the existing group."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    ready = dist.group.WORLD
    torch_init = c10d.init_process_group
    adopted = False

    @functools.wraps(torch_init)
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
