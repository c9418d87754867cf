"""Train for SECONDS or until FILE exists, with one slow rank: straggling.py RANK SECONDS FILE HOW.

HOW the rank is slow: it sleeps, works, is suspended in bursts, or has a CPU quota.
"""

import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist

from meshrun import current_mesh

mesh, tensor = current_mesh(), torch.ones(64)
slow, seconds, how = int(sys.argv[1]), float(sys.argv[2]), sys.argv[4]
is_slow = dist.get_rank() == slow
if is_slow and how == "suspended" and os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        os.kill(parent, signal.SIGSTOP)
        time.sleep(0.03)
        os.kill(parent, signal.SIGCONT)
        time.sleep(0.03)
    os._exit(0)
if is_slow and how == "quota":  # 5 ms of 100
    os.makedirs(group := "/sys/fs/cgroup/cpu/meshrun-test", exist_ok=True)
    for name, value in (("cfs_period_us", 100_000), ("cfs_quota_us", 5_000)):
        open(f"{group}/cpu.{name}", "w").write(str(value))
    open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
flag = torch.zeros(1)
begun = time.monotonic()
while not flag.item():
    time.sleep(0.02 + random.random() * 0.01 + (0.03 if is_slow and how == "sleeps" else 0.0))
    until = time.process_time() + (0.033 if is_slow and how == "works" else 0.003)
    while time.process_time() < until:
        pass
    dist.all_reduce(tensor, group=mesh.get_group("tp"))
    dist.all_reduce(tensor.clone(), group=mesh.get_group("dp"))
    tensor.fill_(1)
    flag[0] = os.path.exists(sys.argv[3]) or time.monotonic() - begun > seconds
    dist.all_reduce(flag)
