"""What each rank runs to time its steps: ``steps_program.py STEPS``; rank 0 prints their mean."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from meshrun import current_mesh, progress

STEP_S = 0.010
WARM_UP = 100

steps = int(sys.argv[1])
groups = [current_mesh()[name].get_group() for name in ("dp", "tp")]
rows = torch.ones(64, 64)
gradient = torch.ones(4096)
for step in range(WARM_UP + steps):
    if step == WARM_UP:
        dist.barrier()
        began = time.perf_counter()
    until = time.perf_counter() + STEP_S
    while time.perf_counter() < until:  # Python's own work, which a thread of ours would hold up
        rows @ rows
    for group in groups:
        dist.all_reduce(gradient, group=group)
    progress(step)
if dist.get_rank() == 0:
    print(f"step {(time.perf_counter() - began) / steps * 1000:.4f} ms", flush=True)
dist.destroy_process_group()
