"""Print rank, host, mesh coordinate and the sum of all ranks."""

import os
import socket

import torch
import torch.distributed as dist

from meshrun import current_mesh

mesh = current_mesh()
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
where = " ".join(f"{name} {mesh.get_local_rank(name)}" for name in mesh.mesh_dim_names)
size = os.environ["WORLD_SIZE"]
print(f"rank {dist.get_rank()} of {size} on {socket.gethostname()}: {where}, sum {total.item()}")
