"""Reduce three times over NCCL, count what torch recorded, and hang if there is an argument."""

import sys

import torch
import torch.distributed as dist

from meshrun import current_mesh
from meshrun.worker.answer_requests import read_calls

group = current_mesh().get_group("tp")
ones = torch.ones(1024, device="cuda")
for _ in range(3):
    dist.all_reduce(ones, group=group)
torch.cuda.synchronize()
calls = [call for each in read_calls() for call in each.calls if call.op == "all_reduce"]
print("recorded", len(calls), flush=True)
if sys.argv[1:]:
    torch.cuda._sleep(1 << 43)  # more than an hour
    dist.all_reduce(ones, group=group)
    torch.cuda.synchronize()
