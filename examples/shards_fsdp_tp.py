"""FSDP2 x tensor parallelism: which rank holds which weights, and the full weight in order.

    meshrun --mesh fsdp=2,tp=4 examples/shards_fsdp_tp.py

A layer's 144 weights are numbered from 101. ``tp`` splits its rows first, then ``fsdp`` splits
what each rank got, by whole rows: of a 12x12 weight, each ``tp`` rank gets three rows, which
``fsdp`` splits into two and one; a 24x6 weight splits evenly. ``full_tensor()`` puts the rows back
in order.
"""

import logging

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from meshrun import current_mesh

# Each rank would warn that gathering a weight that is sharded twice takes two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shard(rows: int, columns: int) -> None:
    """Print this rank's part of a weight, and check the full weight and the layer's output."""
    fsdp, tp = current_mesh("fsdp"), current_mesh("tp")
    weight = torch.arange(101.0, 245.0, device=tp.device_type).view(rows, columns)
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    parallelize_module(layer, tp, ColwiseParallel(use_local_output=False))
    fully_shard(layer, mesh=fsdp)

    part = layer.weight.to_local().flatten()
    print(f"{rows}x{columns}: {len(part)} weights, {part[0]:.0f} to {part[-1]:.0f}")
    assert torch.equal(layer.weight.full_tensor(), weight)
    batch = torch.ones(2, columns, device=tp.device_type)
    assert torch.equal(layer(batch).full_tensor(), batch @ weight.T)


def main() -> None:
    """Shard weights of both shapes; one rank reports that the full weights are right."""
    shard(12, 12)
    shard(24, 6)
    if current_mesh().get_coordinate() == (0, 0):
        print("full_tensor() is 101 to 244 in order, twice")


if __name__ == "__main__":
    main()
