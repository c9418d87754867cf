"""A script in the style of DeepSpeed's examples, without deepspeed."""

import argparse
import os

import torch
import torch.distributed as dist
from small_training import batches, flat, model, report

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float, default=0.0)
options = parser.parse_args()
local_rank = int(os.environ.get("LOCAL_RANK", options.local_rank))
elastic = dist.is_torchelastic_launched()
dist.init_process_group("gloo")
plain = model()
before = flat(plain)
net = torch.nn.parallel.DistributedDataParallel(plain)
optimizer = torch.optim.SGD(net.parameters(), lr=options.lr)
for inputs, wanted in batches():
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(inputs), wanted).backward()
    optimizer.step()
report(
    before,
    flat(plain),
    library=[dist.get_rank(), local_rank, dist.get_world_size()],
    elastic=elastic and options.local_rank in (-1, local_rank),
)
dist.destroy_process_group()
