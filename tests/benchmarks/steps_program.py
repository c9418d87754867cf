"""The program of ranks that are observed: ``steps_program.py STEPS REPEATS``.

A step repeats the same work REPEATS times; with 0 steps, it prints how many repeats take 10 ms.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from meshrun import current_mesh, progress

STEP_S = 0.010
TRIED_S = 2.0
WARM_UP = 100

steps, repeats = int(sys.argv[1]), int(sys.argv[2])
groups = [current_mesh()[name].get_group() for name in ("dp", "tp")]
rows = torch.ones(64, 64)
gradient = torch.ones(4096)
for step in range(steps):
    if step == WARM_UP and dist.get_rank() == 0:
        print("up", flush=True)
    for _ in range(repeats):
        rows @ rows
    for group in groups:
        dist.all_reduce(gradient, group=group)
    progress(step)
if not steps:
    done, began = 0, time.process_time()
    while time.process_time() < began + TRIED_S:
        rows @ rows
        done += 1
    print(int(done * STEP_S / TRIED_S), flush=True)
dist.destroy_process_group()
