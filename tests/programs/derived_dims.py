"""Check derived dims on each rank, and print facts of rank 0 as JSON.

Run with eight ranks and --mesh dp=2,cp=2,tp=2 --flatten dp_cp=dp+cp
--view moe:dp=2,efsdp=-1,ep=2 --view flat:all=8.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from meshrun import MeshError, current_layout, current_mesh

layout = current_layout()
ranks = dist.get_process_group_ranks


def refused(*dims):
    try:
        current_mesh(*dims)
    except MeshError as error:
        return f"{error.message}; {error.hint}"
    return "no error"


for dim in ("dp", "cp", "tp", "dp_cp", "efsdp", "ep", "all"):
    mesh = current_mesh(dim)
    assert mesh is current_mesh(dim)
    group = mesh.get_group()
    assert ranks(group) == list(layout.group(dim)), dim
    assert dist.get_rank(group) == layout.dim_rank(dim) == mesh.get_local_rank(), dim
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=group)
    assert total == sum(layout.group(dim)), dim

moe = current_mesh("moe")
assert moe.mesh_dim_names == ("dp", "efsdp", "ep")
assert current_mesh("efsdp", "ep").mesh.flatten().tolist() == [
    rank for rank in range(8) if layout.dim_rank("dp", rank) == layout.dim_rank("dp")
]
joined = current_mesh("dp_cp", "tp")
assert joined.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
assert current_mesh("dp", "cp", "tp") is current_mesh()

# FSDP joins both meshes into one, which torch allows only for dims of the same root mesh.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8, bias=False))
whole = model[0].weight.detach().clone()
parallelize_module(model, current_mesh("tp"), {"0": ColwiseParallel()})
fully_shard(model, mesh=current_mesh("dp_cp"))
assert torch.equal(model[0].weight.full_tensor(), whole)

if dist.get_rank() == 0:
    world = dist.distributed_c10d._world
    options = {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for name, group in (("world", dist.group.WORLD),
                            *((dim, current_mesh(dim).get_group()) for dim in
                              ("dp", "tp", "dp_cp", "efsdp", "ep")))
    }  # fmt: skip
    print(json.dumps({
        "groups": len(world.pg_map),
        "shared": moe["dp"].get_group() is current_mesh("dp").get_group()
        and moe["ep"].get_group() is current_mesh("tp").get_group()
        and current_mesh("all").get_group() is not dist.group.WORLD,
        "timeouts": options,
        "refused": [refused("zz"), refused("cp", "ep"), refused("cp", "dp_cp"),
                    refused("tp", "dp")],
    }))  # fmt: skip
