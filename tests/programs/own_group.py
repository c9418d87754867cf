"""A typical program for torchrun: its own group, a failure, and a restart from a checkpoint.

own_group.py FOLDER HOW: rank 1 fails in the first generation, before, in or after a collective.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

checkpoint, how = Path(sys.argv[1]) / "step", sys.argv[2]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank = int(os.environ["RANK"])


def fail() -> None:
    if first and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
if how == "before":
    fail()
for step in range(step, 4):  # noqa: B020
    total = torch.ones(1)
    if how == "in" and step == 2:
        fail()
    dist.all_reduce(total)
    if rank == 0:
        checkpoint.with_suffix(".new").write_text(str(step + 1))
        checkpoint.with_suffix(".new").replace(checkpoint)  # the rank may be killed at any moment
    if how == "after" and step == 2:
        fail()
    dist.barrier()
print("total", int(total), "step", step)
dist.destroy_process_group()
