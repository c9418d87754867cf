"""Hybrid sharding: which rank holds which weights, before and after a step.

    meshrun --mesh replicate=2,shard=4 examples/shards_hsdp.py

The weights are numbered 101 to 200. Each row of the mesh holds all of them, a quarter on each rank.
Gradients are averaged over both dims, so the copies stay equal.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshrun import current_layout, current_mesh


def own_shard(layer: nn.Linear) -> str:
    """Return the number of weights that this rank holds, the first and the last."""
    shard = layer.weight.to_local().flatten()
    return f"{len(shard)} weights, {shard[0]:.1f} to {shard[-1]:.1f}"


def main() -> None:
    """Shard a layer, train it for one step, and print this rank's shard before and after."""
    mesh, rank = current_mesh("replicate", "shard"), current_layout().own_rank
    layer = nn.Linear(5, 20, bias=False)
    layer.weight = nn.Parameter(torch.arange(101.0, 201.0).view(20, 5))
    layer.to(mesh.device_type)
    fully_shard(layer, mesh=mesh)
    print("holds", own_shard(layer))

    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    # Rank r's batch is r, r, r, r, r, so its gradient is r for every weight.
    layer(torch.full((1, 5), float(rank), device=mesh.device_type)).sum().backward()
    optimizer.step()
    print("after a step", own_shard(layer))


if __name__ == "__main__":
    main()
