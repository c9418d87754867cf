"""Rank 0 computes for SECONDS, or sleeps for ever if negative; the others wait for it."""

import os
import sys
import time

import torch
import torch.distributed as dist

seconds = float(sys.argv[1])
if os.environ["RANK"] == "0":
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100_000))
    while seconds < 0:
        time.sleep(1)
dist.all_reduce(torch.ones(1))
