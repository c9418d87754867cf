"""Reduce along each dim of the mesh, and print the device type and backend."""

import torch
import torch.distributed as dist

from meshrun import current_mesh

mesh = current_mesh()
device = torch.device("cuda", torch.cuda.current_device())
for dim in mesh.mesh_dim_names or ():
    group = mesh.get_group(dim)
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones, group=group)
    backend = group._get_backend(device).name()
    print(f"{dim}: {ones.sum().item():g} by {backend} on {mesh.device_type}", flush=True)
