"""Pipeline x data x tensor parallelism, with the layout saying who sends to whom.

    meshrun --mesh pp=2,dp=2,tp=2 examples/pipeline.py
    meshrun --mesh pp=4,dp=1,tp=1 examples/pipeline.py

Four blocks learn to turn eight numbers round. Each stage of the pipeline holds some of them; within
a stage `tp` cuts their layers, and `dp` shards what is left and splits the batch. Any sizes do, as
long as `pp` divides four and `dp` the batch: the loss stays the same.
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

from meshrun import current_layout, current_mesh, data_shard

STEPS, BLOCKS, WIDTH = 21, 4, 8
BATCH, MICRO_BATCHES = 64, 2


class Block(nn.Module):
    """Two layers beside a direct way."""

    def __init__(self) -> None:
        """Make the layers; tensor parallelism cuts the first by columns, the second by rows."""
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return as many numbers."""
        return numbers + self.down(self.up(numbers).tanh())


def build_stage() -> nn.Module:
    """Return the blocks of this rank's stage, cut along ``tp`` and sharded along ``dp``."""
    layout = current_layout()
    torch.manual_seed(0)  # every rank begins with the same weights
    blocks = [Block() for _ in range(BLOCKS)]
    count = BLOCKS // layout.size("pp")
    first = layout.dim_rank("pp") * count
    stage = nn.Sequential(*blocks[first : first + count]).to(current_mesh().device_type)
    for block in stage:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, current_mesh("tp"), plan)
    return fully_shard(stage, mesh=current_mesh("dp"))


def send(numbers: torch.Tensor, rank: int) -> None:
    """Send to a rank of another stage."""
    dist.send(numbers, rank, group=current_mesh("pp").get_group())


def receive(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what a rank of another stage sends, of the shape of a tensor here."""
    numbers = torch.empty_like(like)
    dist.recv(numbers, rank, group=current_mesh("pp").get_group())
    return numbers


def run_step(stage: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Send a batch forward through the stages and gradients back; return the last one's loss."""
    layout = current_layout()
    before, after = layout.neighbor("pp", -1), layout.neighbor("pp", +1)
    parts = batch.chunk(MICRO_BATCHES)
    passed = []
    for part in parts:
        inputs = part if before is None else receive(part, before).requires_grad_()
        outputs = stage(inputs)
        if after is not None:
            send(outputs.detach(), after)
        passed.append((inputs, outputs))
    total = torch.zeros((), device=batch.device)
    for part, (inputs, outputs) in zip(parts, passed, strict=True):
        if after is None:
            loss = nn.functional.mse_loss(outputs, part.flip(1)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        else:
            outputs.backward(receive(outputs, after))
        if before is not None:
            send(inputs.grad, before)
    return total


def describe() -> str:
    """Return where this rank stands, and with whom."""
    layout, stage_mesh = current_layout(), current_mesh("dp", "tp")
    source = "data" if layout.is_first("pp") else f"rank {layout.neighbor('pp', -1)}"
    target = "loss" if layout.is_last("pp") else f"rank {layout.neighbor('pp', +1)}"
    return (
        f"{source} -> stage {layout.dim_rank('pp')} -> {target}, stage {stage_mesh.mesh.tolist()},"
        f" dp {list(layout.group('dp'))}, tp {list(layout.group('tp'))}"
    )


def main() -> None:
    """Say who is where, train, and print the loss from one rank of the last stage."""
    layout, dp = current_layout(), current_mesh("dp")
    print(describe())
    if layout.own_rank == 0:  # any rank could: it needs no communication
        for rank in range(layout.world_size):
            print(f"rank {rank} is at {layout.coordinate(rank)}")

    stage = build_stage()
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.03)
    generator = torch.Generator().manual_seed(0)
    part, parts = data_shard()
    speaks = layout.own_rank == layout.rank(pp=layout.size("pp") - 1, dp=0, tp=0)
    for step in range(STEPS):
        batch = torch.rand(BATCH, WIDTH, generator=generator) * 2 - 1
        loss = run_step(stage, batch.chunk(parts)[part].to(dp.device_type))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            dist.all_reduce(loss, group=dp.get_group())
            if speaks:
                print(f"step {step:2d}  loss {loss.item() / parts:.4f}")


if __name__ == "__main__":
    main()
