"""The Lightning Trainer with DDP, under meshrun.

    meshrun --mesh dp=2 examples/lightning_ddp.py

Lightning reads the variables that torchrun would set, so it starts no processes of its own. On
GPUs, set ``accelerator="gpu"``.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshrun import current_layout


class Quadrants(lightning.LightningModule):
    """Learns which quadrant a point lies in."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch, and print it every ten steps."""
        points, quadrants = batch
        loss = nn.functional.cross_entropy(self.net(points), quadrants)
        if self.global_step % 10 == 0 and self.global_rank == 0:
            print(f"step {self.global_step:2d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main() -> None:
    """Train for 31 steps; Lightning gives each rank its part of the data."""
    layout = current_layout()
    lightning.seed_everything(0, verbose=False)
    points = torch.rand(2048, 2) * 2 - 1
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=layout.world_size // layout.nnodes,
        num_nodes=layout.nnodes,
        strategy="ddp",
        max_steps=31,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Quadrants(), DataLoader(TensorDataset(points, quadrants), batch_size=64))


if __name__ == "__main__":
    main()
