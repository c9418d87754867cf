"""The program of each rank: ``rank_program.py reduce|idle|keep|destroy DPxTP [GATE]``.

Both launchers run the same file, so that they differ only in where the mesh comes from. It imports
only what a user's program would, as each import is part of the measured time.
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
    """Sleep in the kernel until the benchmark closes its end of a pipe or exits.

    It is opened such that a gate whose other end has already been closed reads as closed.
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
    # If one rank crashes, the launcher's signal must not hide how the others end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reduce_once()
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()
