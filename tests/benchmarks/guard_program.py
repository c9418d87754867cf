"""The ranks' program for kills, reports and stacks: ``guard_program.py WHAT DPxTP GATE [FILE]``.

``loader``: each rank starts two loader workers, then waits for the gate. ``stuck``: all but the
last rank wait in an all_reduce for the last, which waits for the gate. ``dies`` and ``deaf``:
rank 3 writes the time to FILE and kills itself; the others wait, with ``deaf`` ignoring SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

what, shape, gate = sys.argv[1:4]
if "MESHRUN_MESH" in os.environ:
    from meshrun import current_mesh

    mesh = current_mesh()
else:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(int(size) for size in shape.split("x"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
rank = dist.get_rank()


def wait_for_gate() -> None:
    """Sleep until the benchmark closes its end of a pipe or exits."""
    fd = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    print("ready", flush=True)
    os.read(fd, 1)


def load() -> None:
    """Hold two loader workers that have delivered a batch."""
    from torch.utils.data import DataLoader

    loader = DataLoader(list(range(64)), batch_size=4, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    wait_for_gate()


def get_stuck() -> None:
    """Wait for a peer that never comes."""
    if rank == dist.get_world_size() - 1:
        wait_for_gate()
    else:
        print("ready", flush=True)
    dist.all_reduce(torch.ones(1))


def die() -> None:
    """Kill one rank with SIGKILL."""
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    if rank == 3:
        log = os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, f"{time.monotonic_ns()}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


{"loader": load, "stuck": get_stuck, "dies": die, "deaf": die}[what]()
dist.destroy_process_group()
