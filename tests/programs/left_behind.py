"""Rank 0 leaves a process that inherits its descriptors: left_behind.py FOLDER HOW LEAVING.

The other rank waits until rank 0 has ended and that process has answered, then needs rank 0 again.
"""

import ctypes
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

folder, how, leaving = sys.argv[1:]
SAYS = f"while [ ! -e {folder}/ask ]; do sleep 0.01; done; touch {folder}/answer; exec sleep 600"


def stay():
    os.execvp("sh", ["sh", "-c", SAYS])


dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    open(f"{folder}/pid", "w").write(str(os.getpid()))
    if how == "popen":
        subprocess.Popen(["sh", "-c", SAYS], close_fds=False, start_new_session=True)
    elif how == "loader":
        next(iter(loader := DataLoader(range(8), num_workers=2, persistent_workers=True)))
    elif os.fork() == 0:
        os.setsid()
        if how == "fork" or os.fork() == 0:
            stay()
        os._exit(0)
dist.barrier()
if dist.get_rank() == 0:
    if leaving == "destroy":
        dist.destroy_process_group()
    if leaving == "_exit":
        os._exit(0)
    if leaving == "C's exit":
        ctypes.CDLL(None).exit(0)
    sys.exit()
while os.path.exists(f"/proc/{open(f'{folder}/pid').read()}"):
    time.sleep(0.01)
open(f"{folder}/ask", "w").close()
while how != "loader" and not os.path.exists(f"{folder}/answer"):
    time.sleep(0.01)
dist.all_reduce(total)
