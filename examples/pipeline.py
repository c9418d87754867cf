"""Pipeline x data x tensor parallelism; the layout says which rank sends to which.

    meshrun --mesh pp=2,dp=2,tp=2 examples/pipeline.py
    meshrun --mesh pp=4,dp=1,tp=1 examples/pipeline.py

Four blocks learn to reverse eight numbers. Each pipeline stage has some of the blocks; within a
stage, ``tp`` splits their layers, and ``dp`` shards what each rank got and splits the batch. The
loss is the same on any mesh whose ``pp`` divides four and whose ``dp`` divides the batch.

For other schedules, pass ``current_mesh("pp").get_group()`` to ``PipelineStage`` of
``torch.distributed.pipelining``.
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
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        """Make the layers: ``up`` is split by columns, ``down`` by rows."""
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return numbers + self.down(self.up(numbers).tanh())


def build_stage() -> nn.Module:
    """Return the blocks of this rank's stage, split along ``tp`` and sharded along ``dp``."""
    layout = current_layout()
    torch.manual_seed(0)  # the same weights on every rank
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
    """Receive a tensor of a given shape from a rank of another stage."""
    numbers = torch.empty_like(like)
    dist.recv(numbers, rank, group=current_mesh("pp").get_group())
    return numbers


def run_step(stage: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Run a batch forward and backward through the stages; return the loss on the last one."""
    layout = current_layout()
    previous, following = layout.neighbor("pp", -1), layout.neighbor("pp", +1)
    micro_batches = batch.chunk(MICRO_BATCHES)
    passes = []
    for part in micro_batches:
        inputs = part if previous is None else receive(part, previous).requires_grad_()
        outputs = stage(inputs)
        if following is not None:
            send(outputs.detach(), following)
        passes.append((inputs, outputs))
    total = torch.zeros((), device=batch.device)
    for part, (inputs, outputs) in zip(micro_batches, passes, strict=True):
        if following is None:
            loss = nn.functional.mse_loss(outputs, part.flip(1)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        else:
            outputs.backward(receive(outputs, following))
        if previous is not None:
            send(inputs.grad, previous)
    return total


def describe() -> str:
    """Return this rank's stage and groups, and the ranks that it sends to and receives from."""
    layout, stage_mesh = current_layout(), current_mesh("dp", "tp")
    source = "data" if layout.is_first("pp") else f"rank {layout.neighbor('pp', -1)}"
    target = "loss" if layout.is_last("pp") else f"rank {layout.neighbor('pp', +1)}"
    return (
        f"{source} -> stage {layout.dim_rank('pp')} -> {target}, stage {stage_mesh.mesh.tolist()},"
        f" dp {list(layout.group('dp'))}, tp {list(layout.group('tp'))}"
    )


def main() -> None:
    """Print where each rank is, train, and print the loss from one rank of the last stage."""
    layout, dp = current_layout(), current_mesh("dp")
    print(describe())
    if layout.own_rank == 0:  # any rank could do this: it needs no communication
        for rank in range(layout.world_size):
            print(f"rank {rank} is at {layout.coordinate(rank)}")

    stage = build_stage()
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.03)
    generator = torch.Generator().manual_seed(0)
    part, parts = data_shard()
    prints = layout.own_rank == layout.rank(pp=layout.size("pp") - 1, dp=0, tp=0)
    for step in range(STEPS):
        batch = torch.rand(BATCH, WIDTH, generator=generator) * 2 - 1
        loss = run_step(stage, batch.chunk(parts)[part].to(dp.device_type))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            dist.all_reduce(loss, group=dp.get_group())
            if prints:
                print(f"step {step:2d}  loss {loss.item() / parts:.4f}")


if __name__ == "__main__":
    main()
