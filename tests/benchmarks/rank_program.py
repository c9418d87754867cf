"""What each rank runs: ``rank_program.py reduce|idle|keep|destroy DPxTP [GATE]``.

One file for both launchers, so that they differ only in where the mesh comes from. It imports
what a user's program would and nothing more, since each import here is part of what is measured.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

if "MESHRUN_MESH" in os.environ:
    from meshrun import current_mesh

    mesh = current_mesh()
else:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(int(size) for size in sys.argv[2].split("x"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def reduce_once() -> None:
    """Use the mesh once: a launch is over only when its groups are known to work."""
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["tp"].get_group())
    if total.item() != mesh["tp"].size():
        raise SystemExit(f"all_reduce gave {total.item()}")


def idle_until_gate_closes() -> None:
    """Sleep in the kernel until the benchmark closes its end of a pipe, or is gone itself.

    Opened so that a gate whose other end is gone already reads as closed, and holds nobody up.
    """
    gate = os.open(sys.argv[3], os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(gate, True)
    print("ready", flush=True)
    os.read(gate, 1)


if sys.argv[1] == "idle":
    idle_until_gate_closes()
elif sys.argv[1] == "reduce":
    reduce_once()
    dist.destroy_process_group()
else:
    # A launcher that ends the others because one rank crashed would hide how they end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reduce_once()
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()
