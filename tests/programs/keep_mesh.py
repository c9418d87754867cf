"""Keep the mesh in a global, use it, and exit with the given code."""

import sys

import torch
import torch.distributed as dist

from meshrun import current_mesh

mesh = current_mesh()
dist.all_reduce(torch.ones(4), group=mesh.get_group(0))
if "own" in sys.argv:
    from torch.distributed.device_mesh import init_device_mesh

    mine = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=("a", "b"))
    dist.all_reduce(torch.ones(4), group=mine.get_group("a"))
if "destroy" in sys.argv:
    dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
