"""A start with the mesh that meshrun has built: one collective."""

import torch
import torch.distributed as dist

from meshrun import current_mesh

ones = torch.ones(4, device="cuda")
dist.all_reduce(ones, group=current_mesh().get_group("tp"))
torch.cuda.synchronize()
