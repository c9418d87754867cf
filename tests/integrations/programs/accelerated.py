"""Accelerate on CPUs: prepare, backward, gather."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from small_training import batches, flat, model, report

accelerator = Accelerator(cpu=True)
plain = model()
before = flat(plain)
net, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
for inputs, wanted in batches():
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(net(inputs), wanted))
    optimizer.step()
gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
assert gathered == list(range(accelerator.num_processes)), gathered
report(
    before,
    flat(plain),
    library=[
        accelerator.process_index,
        accelerator.local_process_index,
        accelerator.num_processes,
    ],
    elastic=dist.is_torchelastic_launched()
    and accelerator.distributed_type == DistributedType.MULTI_CPU,
)
accelerator.end_training()
