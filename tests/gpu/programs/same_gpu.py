"""Reduce over NCCL on the first GPU, which NCCL refuses for two ranks."""

import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
