"""The program of ranks on several nodes: ``nodes_program.py mesh|stop|stay|lost DPxTP FOLDER``.

Ranks create the mesh, use it once, and print the time. With ``mesh`` they then exit; otherwise
they stay: with ``stop`` until the last rank exits with 3, once FOLDER/go exists; with ``lost`` they
keep using the mesh.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

what, shape, folder = sys.argv[1:4]
if "MESHRUN_MESH" in os.environ:
    from meshrun import current_mesh

    mesh = current_mesh()
else:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(int(size) for size in shape.replace("-1", os.environ["WORLD_SIZE"]).split("x"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
dist.all_reduce(torch.ones(1))
sys.stdout.write(f"ready {time.monotonic_ns()}\n")  # in one write, as all write to one file
sys.stdout.flush()
is_last = dist.get_rank() == dist.get_world_size() - 1
while what != "mesh":
    if what == "stop" and is_last and os.path.exists(f"{folder}/go"):
        with open(f"{folder}/exit", "w") as file:
            file.write(str(time.monotonic_ns()))
        os._exit(3)
    if what == "lost":
        dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
dist.destroy_process_group()
