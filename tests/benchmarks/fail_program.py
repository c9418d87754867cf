"""The program of ranks, one of which dies: ``fail_program.py again|signalled DPxTP FILE``.

Each rank appends lines ``EVENT RANK NANOSECONDS`` to FILE, in monotonic time, one write per line.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

rank = int(os.environ["RANK"])
if "MESHRUN_MESH" in os.environ:
    from meshrun import current_mesh

    mesh = current_mesh()
else:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(int(size) for size in sys.argv[2].split("x"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
log = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND)


def note(event: str) -> None:
    """Append a line; short writes are atomic."""
    os.write(log, f"{event} {rank} {time.monotonic_ns()}\n".encode())


def on_signal(*_: object) -> None:
    """Note the time of the launcher's signal; exit a little later, as exiting keeps a core busy."""
    note("signalled")
    if sys.argv[1] == "signalled":
        time.sleep(0.2)
    os._exit(0)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGTERM, on_signal)
    dist.barrier()
    if rank == 3:
        note("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()
dist.barrier()
note("again")
dist.destroy_process_group()
