"""The same start without meshrun's mesh, for torchrun: group, mesh, one collective."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
mesh = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
ones = torch.ones(4, device="cuda")
dist.all_reduce(ones, group=mesh.get_group("tp"))
torch.cuda.synchronize()
dist.destroy_process_group()
