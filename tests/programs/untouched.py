"""Check that this rank looks new and that its mesh works."""

import os

import torch
import torch.distributed as dist

from meshrun import current_mesh

assert not dist.is_initialized()
assert len(os.listdir("/proc/self/task")) <= 2  # the main thread, and meshrun's own
mesh = current_mesh()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == mesh.size()
print("untouched", flush=True)
