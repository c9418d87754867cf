"""Sub-meshes of a 3-D mesh: hybrid sharding over two of its dims, tensor parallelism over one.

    meshrun --mesh replicate=2,shard=2,tp=2 examples/slices.py

Every rank prints the ranks of its sub-meshes. Then ``tp`` splits a layer with the weights 0 to 7,
``shard`` shards what each rank got, and ``replicate`` replicates it.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from meshrun import current_layout, current_mesh


def main() -> None:
    """Print this rank's sub-meshes and its part of the weight."""
    hsdp = current_mesh("replicate", "shard")
    tp = current_mesh("tp")
    slices = {"hsdp": hsdp, "replicate": hsdp["replicate"], "shard": hsdp["shard"], "tp": tp}
    rank = current_layout().own_rank
    listed = [f"{name} {part.mesh.tolist()}" for name, part in slices.items()]
    print(f"rank {rank} is in", ", ".join(listed))

    layer = nn.Linear(1, 8, bias=False, device=tp.device_type)
    layer.weight = nn.Parameter(torch.arange(8.0, device=tp.device_type).view(8, 1))
    parallelize_module(layer, tp, ColwiseParallel())
    fully_shard(layer, mesh=hsdp)
    print(f"rank {rank} keeps {layer.weight.to_local().flatten().tolist()}")


if __name__ == "__main__":
    main()
