"""Ranks that wait for each other in collectives; argv[1] says how.

``ops``: rank 3 calls another collective than rank 2. ``spin``: the same, and each looks for the end
without pause. ``late``: rank 3 calls nothing. ``shapes``: rank 3 has a smaller tensor.
"""

import sys
import time

import torch
import torch.distributed as dist

from meshrun import current_mesh


def load() -> None:
    time.sleep(3600)


how, rank, tensor = sys.argv[1], dist.get_rank(), torch.ones(1024)
group = current_mesh().get_group("tp")
dist.all_reduce(tensor, group=group)
if rank == 3 and how == "late":
    load()
if how == "shapes":
    work = dist.all_reduce(tensor[: 8 if rank == 3 else 1024], group=group, async_op=True)
elif rank == 3:
    parts = [torch.ones(1024), torch.ones(1024)]
    work = dist.all_gather(parts, tensor, group=group, async_op=True)
else:
    work = dist.all_reduce(tensor, group=group, async_op=True)
while how == "spin" and not work.is_completed():
    pass
work.wait()
work = dist.barrier(async_op=True)
while how == "spin" and not work.is_completed():
    pass
work.wait()
