"""Say whether this rank is as new, and its mesh works."""

import os

import torch
import torch.distributed as dist

from meshrun import current_mesh

assert not dist.is_initialized()
assert len(os.listdir("/proc/self/task")) <= 2  # this one, and the one that answers questions
mesh = current_mesh()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == mesh.size()
print("untouched", flush=True)
