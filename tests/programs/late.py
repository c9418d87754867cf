"""Rank 3 does not call the all_reduce of its dp group."""

import time

import torch
import torch.distributed as dist

from meshrun import current_mesh

mesh, tensor = current_mesh(), torch.ones(4)
if dist.get_rank() == 3:
    time.sleep(3600)
dist.all_reduce(tensor, group=mesh.get_group("dp"))
dist.barrier()
