"""Create the process group as most training scripts do, then use and recreate it."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

if "guarded" in sys.argv:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
else:
    dist.init_process_group(backend="gloo", timeout=timedelta(seconds=77))
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total.item()), dist.get_backend(), flush=True)
if "twice" in sys.argv:
    dist.init_process_group("gloo")
dist.destroy_process_group()
if "again" in sys.argv:
    for _ in range(2):
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("again", int(total.item()), flush=True)
        dist.destroy_process_group()
