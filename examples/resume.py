"""Train with checkpoints: continue after a kill where training was, on a mesh of any size.

    meshrun --mesh dp=4 --max-restarts 3 examples/resume.py checkpoints

FSDP2 shards a small network over ``dp``, and every tenth step is saved. Kill a rank, and all
restart from the last checkpoint. Kill the launch, and continue with more or fewer ranks:

    meshrun --mesh dp=2 examples/resume.py checkpoints 200

Each step's loss is the same on any mesh: a step's batch depends on its number alone, and each rank
takes its part of it. After SIGTERM, the program saves the current step and exits. A third argument
is the least time a step takes, in seconds, so that you can try all this.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from meshrun import current_layout, current_mesh, data_shard, progress

BATCH = 64  # over all ranks
SAVE_EVERY = 10
KEEP = 2


def make_batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's batch: points, and a noisy sine at each."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, 1, generator=generator) * 2 - 1
    y = torch.sin(3 * x) + 0.3 * torch.randn(BATCH, 1, generator=generator)
    part, parts = data_shard()
    return x[part::parts].to(device), y[part::parts].to(device)


def build(mesh: dist.device_mesh.DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the sharded network and its optimizer."""
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model.to(mesh.device_type)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, in order."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a checkpoint, of which each rank writes a part; rename it once it is complete."""
    unfinished = folder / f"{step}.unfinished"
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=unfinished)  # by all ranks
    if dist.get_rank() == 0:
        os.rename(unfinished, folder / str(step))
        for old in saved_steps(folder)[:-KEEP]:
            shutil.rmtree(folder / str(old))


def load_last(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, resharded for this mesh; return its step, or 0."""
    last = torch.zeros((), dtype=torch.int64, device=current_mesh().device_type)
    if dist.get_rank() == 0:  # decides for all, and removes what an interrupted save left
        for unfinished in folder.glob("*.unfinished"):
            shutil.rmtree(unfinished)
        last += max(saved_steps(folder), default=0)
    dist.broadcast(last, src=0)
    step = int(last)
    if step:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return step


def train_step(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, stop: list[int]
) -> tuple[float, bool]:
    """Return the loss over the whole batch, and whether any rank was asked to stop."""
    mesh = current_mesh("dp")
    x, y = make_batch(step, mesh.device_type)
    loss = (model(x) - y).square().sum() / BATCH  # this rank's part of the mean
    optimizer.zero_grad()
    (loss * mesh.size()).backward()  # fully_shard averages gradients over ranks
    optimizer.step()
    sums = torch.stack([loss.detach(), loss.new_tensor(float(bool(stop)))])
    dist.all_reduce(sums, group=mesh.get_group())  # so that all stop after the same step
    return sums[0].item(), bool(sums[1])


def main() -> None:
    """Train to the last step, and print each step's loss from one rank."""
    folder = Path(sys.argv[1])
    last = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: stop.append(signum))

    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build(current_mesh("dp"))
    done = load_last(folder, model, optimizer)
    first = dist.get_rank() == 0
    if first:
        layout = current_layout()
        where = f"with {layout.shape}, generation {layout.generation}"
        print(f"from step {done} on, {where}", flush=True)
    for step in range(done + 1, last + 1):
        time.sleep(pause_s)
        loss, stopped = train_step(step, model, optimizer, stop)
        progress(step)
        if first:
            print(f"step {step}: loss {loss:.9f}", flush=True)
        if stopped or step % SAVE_EVERY == 0 or step == last:
            save(folder, step, model, optimizer)
        if stopped:
            sys.exit()


if __name__ == "__main__":
    main()
