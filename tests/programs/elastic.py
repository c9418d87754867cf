"""A rank of a launch whose nodes join and leave: elastic.py FOLDER.

Print where the rank is, then run collectives with all others until FOLDER/go exists. Rank 0 raises
once FOLDER/raise exists, and removes it.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from meshrun import current_layout, current_mesh

folder = sys.argv[1]
mesh, layout = current_mesh(), current_layout()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == layout.world_size == mesh.size()
before = layout.previous
was = "nothing" if before is None else f"{before.mesh} of {before.generation}"
where = f"{os.uname().nodename} node {os.environ['GROUP_RANK']}"
rank = f"rank {dist.get_rank()} of {layout.world_size}"
print(f"{rank} in {layout.generation} on {where} after {was}", flush=True)
done = torch.zeros(1)
while not done.item():
    if dist.get_rank() == 0 and os.path.exists(f"{folder}/raise"):
        os.unlink(f"{folder}/raise")
        raise ValueError("the loss is nan")
    done = torch.tensor([float(os.path.exists(f"{folder}/go"))])
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    time.sleep(0.01)
