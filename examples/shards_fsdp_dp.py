"""FSDP2 along one dim of a mesh, combined by hand with data parallelism along the other.

    meshrun --mesh dp=2,fsdp=4 examples/shards_fsdp_dp.py

``fully_shard()`` gets the ``fsdp`` dim alone: each row of the mesh holds a copy of the weights 101
to 200 and averages the gradients of its own four ranks. The program then averages them over ``dp``.
Given both dims, ``fully_shard()`` does that itself: see shards_hsdp.py.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshrun import current_mesh, data_shard


def main() -> None:
    """Print this rank's shard, and its gradient before and after the average over ``dp``."""
    dp, fsdp = current_mesh("dp"), current_mesh("fsdp")
    layer = nn.Linear(5, 20, bias=False)
    layer.weight = nn.Parameter(torch.arange(101.0, 201.0).view(20, 5))
    layer.to(fsdp.device_type)
    fully_shard(layer, mesh=fsdp)
    shard = layer.weight.to_local().flatten()
    print(f"holds {len(shard)} weights, {shard[0]:.0f} to {shard[-1]:.0f}")

    # Part p's batch is p, p, p, p, p, so its gradient is p for every weight.
    part, parts = data_shard("dp", "fsdp")
    layer(torch.full((1, 5), float(part), device=fsdp.device_type)).sum().backward()
    gradient = layer.weight.grad.to_local()
    before = gradient.unique().tolist()
    dist.all_reduce(gradient, group=dp.get_group())
    gradient /= dp.size()
    print(f"part {part} of {parts}: gradient {before}, over dp {gradient.unique().tolist()}")


if __name__ == "__main__":
    main()
