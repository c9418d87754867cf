"""Hybrid sharding: parameters are sharded along ``shard`` and replicated along ``replicate``.

    meshrun --mesh replicate=2,shard=4 examples/hsdp.py

If each row of the mesh is one node, parameters are gathered within it and only gradients cross
nodes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshrun import current_mesh

STEPS = 40


def main() -> None:
    """Fit y = sin(3x) and print the loss from one rank."""
    mesh = current_mesh("replicate", "shard")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model.to(mesh.device_type)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own data
    for step in range(STEPS):
        x = (torch.rand(64, 1, generator=generator) * 2 - 1).to(mesh.device_type)
        loss = (model(x) - torch.sin(3 * x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if dist.get_rank() == 0:
                print(f"step {step:2d}  loss {shown.item() / dist.get_world_size():.3f}")


if __name__ == "__main__":
    main()
