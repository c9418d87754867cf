"""Make other meshes current, and call functions of torch that use the current one."""

import threading

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshrun import current_layout, current_mesh, has_mesh, init_mesh, use_mesh

root = current_mesh()
assert distribute_tensor(torch.ones(4), placements=[Shard(0), Replicate()]).device_mesh is root
other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
with use_mesh(other) as mesh:
    assert mesh is other
    assert current_mesh() is other
    assert current_mesh("all") is current_mesh("all")
    assert distribute_tensor(torch.ones(4), placements=[Shard(0)]).device_mesh is other
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current_mesh()))
    thread.start()
    thread.join()
    assert seen == [root]  # a with block applies to its thread only
    with root:
        assert current_mesh() is root
        assert current_mesh("tp") is current_mesh("tp")
    try:
        current_mesh("tp")
    except RuntimeError as error:
        print(str(error).replace("\n", "; "))
with other:
    assert current_mesh() is other
    assert has_mesh()
assert current_mesh() is root
assert init_mesh("dp=2,tp=2") is root
try:
    init_mesh("dp=4")
except RuntimeError as error:
    print(str(error).replace("\n", "; "))
assert current_layout().mesh_dim_names == root.mesh_dim_names
print("well")
