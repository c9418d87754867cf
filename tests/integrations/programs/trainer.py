"""The Lightning Trainer with DDP."""

import sys

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from small_training import batches, flat, model, report
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()

    def training_step(self, batch):
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.net(inputs), wanted)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


line = Line()
before = flat(line)
data = TensorDataset(*(torch.cat(column) for column in zip(*batches(4), strict=True)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=2,
    logger=False,
    default_root_dir=sys.argv[1],
    enable_model_summary=False,
)
trainer.fit(line, DataLoader(data, batch_size=2))
report(
    before,
    flat(line),
    library=[trainer.global_rank, trainer.local_rank, trainer.world_size],
    elastic=TorchElasticEnvironment.detect()
    and isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment),
    steps=trainer.global_step,
)
