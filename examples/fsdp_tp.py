"""FSDP2 x tensor parallelism on a 2x4 mesh, small enough for a laptop's CPU.

    meshrun --mesh 2x4 --names dp,tp examples/fsdp_tp.py

A two-layer network learns which quadrant a point lies in. Tensor parallelism splits its layers
along ``tp``, FSDP2 shards what each rank got along ``dp``, and each ``dp`` index has its own
batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from meshrun import current_mesh

STEPS = 60


class Classifier(nn.Module):
    """Two linear layers and their loss."""

    def __init__(self) -> None:
        """Make the layers: ``first`` is split by columns, ``second`` by rows."""
        super().__init__()
        self.first = nn.Linear(2, 64)
        self.second = nn.Linear(64, 4)

    def forward(self, points: torch.Tensor, quadrants: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a batch."""
        logits = self.second(self.first(points).relu())
        return nn.functional.cross_entropy(logits, quadrants)


def build_model(mesh: dist.device_mesh.DeviceMesh) -> nn.Module:
    """Return the network, split along ``tp`` and sharded along ``dp``."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Classifier().to(mesh.device_type)
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def make_batch(generator: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and the quadrant of each."""
    points = torch.rand(128, 2, generator=generator) * 2 - 1
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    return points.to(device), quadrants.to(device)


def main() -> None:
    """Train and print the loss from one rank."""
    mesh = current_mesh()
    model = build_model(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    # Ranks of one tp group must see the same batch, so the seed is the dp coordinate.
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for step in range(STEPS):
        points, quadrants = make_batch(generator, mesh.device_type)
        loss = model(points, quadrants)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            shown = loss.detach().clone()
            dist.all_reduce(shown, group=mesh.get_group("dp"))
            if dist.get_rank() == 0:
                print(f"step {step:2d}  loss {shown.item() / mesh['dp'].size():.3f}")


if __name__ == "__main__":
    main()
