"""Print the timeout of each group in seconds."""

import os

import torch
import torch.distributed as dist

from meshrun import current_mesh

if os.environ.get("SET_LATE"):
    os.environ["NCCL_DEBUG"] = "WARN"
mesh = current_mesh()
groups = {"world": dist.group.WORLD, **{dim: mesh.get_group(dim) for dim in mesh.mesh_dim_names}}
for name, group in groups.items():
    options = group._get_backend(torch.device("cpu")).options
    print(name, int(options._timeout.total_seconds()))
