"""Lightning Fabric, with devices and strategy as in its guide."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from small_training import batches, flat, model, report

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
plain = model()
before = flat(plain)
net, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
for inputs, wanted in batches():
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.mse_loss(net(inputs), wanted))
    optimizer.step()
report(
    before,
    flat(plain),
    library=[fabric.global_rank, fabric.local_rank, fabric.world_size],
    elastic=TorchElasticEnvironment.detect()
    and isinstance(fabric.strategy.cluster_environment, TorchElasticEnvironment),
)
