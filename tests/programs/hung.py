"""Ranks that hang in collectives, in the way given by argv[1].

``ops``: ranks 2 and 3 call different collectives. ``spin``: the same, and they poll without pause.
``late``: rank 3 calls nothing. ``shapes``: rank 3 has a smaller tensor.
``afterwards``: rank 0 raises an exception, and rank 3 calls nothing while ranks are asked to end.

With ``nccl`` in argv[2], torch's recorder for NCCL has the calls.
"""

import os
import pickle
import select
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshrun import current_mesh


def record_as_nccl() -> None:
    from torch._C import _distributed_c10d as c10d

    dump = c10d._dump_fr_trace
    c10d._dump_nccl_trace, c10d._dump_fr_trace = dump, lambda *_: pickle.dumps({})
    for group in distributed_c10d._world.pg_backend_config:
        distributed_c10d._world.pg_backend_config[group] = "cpu:gloo,cuda:nccl"


def load() -> None:
    time.sleep(3600)


how, rank, tensor = sys.argv[1], dist.get_rank(), torch.ones(1024)
group = current_mesh().get_group("tp")
if "nccl" in sys.argv[2:]:
    record_as_nccl()
dist.all_reduce(tensor, group=group)
if rank == 3 and how == "late":
    load()
if how == "afterwards":
    signal.signal(signal.SIGTERM, lambda *_: None)
    pids: list[int] = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        raise ValueError("the loss is nan")
    if rank == 3:
        select.select([os.pidfd_open(pids[2])], [], [])  # until rank 2 has timed out
        sys.exit()
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
