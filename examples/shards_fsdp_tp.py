"""FSDP2 x tensor parallelism, seen from the weights: which rank holds which, and all in order.

    meshrun --mesh fsdp=2,tp=4 examples/shards_fsdp_tp.py

The 144 weights of a layer are numbered from 101. `tp` cuts its rows first, `fsdp` cuts again what
each rank got. Both deal out whole rows: a 12x12 weight gives three to each tp rank, so two and one
along `fsdp`; a 24x6 one comes out even. `full_tensor()` undoes both cuts in the right order.
"""

import logging

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from meshrun import current_mesh

# Each rank would say that putting a weight together after two cuts takes two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def cut(rows: int, columns: int) -> None:
    """Print this rank's part of a weight, and check that the whole is as before and works."""
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
    """Cut both shapes; one rank says that the full weights were right."""
    cut(12, 12)
    cut(24, 6)
    if current_mesh().get_coordinate() == (0, 0):
        print("full_tensor() is 101 to 244 in order, twice")


if __name__ == "__main__":
    main()
