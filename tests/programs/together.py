"""Call a collective, print a line, and then do what the arguments say.

together.py [stay] [save] [raise=RANK] [exit=RANK:CODE] [once]
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
words = dict(word.partition("=")[::2] for word in sys.argv[1:])
first = os.environ["MESHRUN_GENERATION"] == "0"
if not dist.is_initialized():
    dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
if first or "once" not in words:
    if words.get("raise") == str(rank):
        raise ValueError("the loss is nan")
    if words.get("exit", "").partition(":")[0] == str(rank):
        sys.exit(int(words["exit"].partition(":")[2]))
if "save" in words:  # exit with 0 on SIGTERM, as if it had saved a checkpoint
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while "stay" in words and (first or "once" not in words):
    time.sleep(0.05)
