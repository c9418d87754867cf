"""Print one line with the rank's coordinate, its group's sum, and the store's address."""

import os
import sys

import meshrun

if "layout" in sys.argv:
    layout = meshrun.current_layout()
    text = f"{layout.own_rank} of {layout.world_size} on {layout.nproc_per_node}"
else:
    import torch
    import torch.distributed as dist

    mesh = meshrun.current_mesh()
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=mesh.get_group(mesh.mesh_dim_names[-1]))
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    where = " ".join(os.environ.get(name, "-") for name in names)
    text = f"{dist.get_rank()} {mesh.get_coordinate()} {total.item():.0f} {where}"
os.write(1, f"{text}\n".encode())
