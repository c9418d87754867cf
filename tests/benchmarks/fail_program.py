"""What ranks run where one of them dies: ``fail_program.py again|told DPxTP FILE``.

Each rank appends lines ``WHAT RANK NANOSECONDS`` to FILE, monotonic time, one write a line.
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


def note(what: str) -> None:
    """Append a line; a short one is written whole."""
    os.write(log, f"{what} {rank} {time.monotonic_ns()}\n".encode())


def told(*_: object) -> None:
    """Say when the launcher's signal came; stay a little, as an end keeps a core busy."""
    note("told")
    if sys.argv[1] == "told":
        time.sleep(0.2)
    os._exit(0)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGTERM, told)
    dist.barrier()
    if rank == 3:
        note("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()
dist.barrier()
note("again")
dist.destroy_process_group()
