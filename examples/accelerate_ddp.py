"""Accelerate with DDP, under meshrun instead of ``accelerate launch``.

    meshrun --mesh dp=2 examples/accelerate_ddp.py

Accelerate reads the variables that torchrun would set. Options of ``accelerate launch`` become
arguments of ``Accelerator``, such as ``mixed_precision="bf16"``. On GPUs, leave ``cpu=True`` out.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train for one epoch and print the loss from one rank."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)  # the same weights and data on every rank
    points = torch.rand(2048, 2) * 2 - 1
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=0.05),
        DataLoader(TensorDataset(points, quadrants), batch_size=32),
    )
    for step, (inputs, targets) in enumerate(batches):  # each rank gets its own batches
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0 or step == len(batches) - 1:
            shown = accelerator.reduce(loss.detach(), reduction="mean")
            if accelerator.is_main_process:
                print(f"step {step:2d}  loss {shown.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
