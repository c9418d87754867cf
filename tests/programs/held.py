"""Report the rank's progress through files, and hold it: held.py FOLDER PLACE GENERATION.

The rank is held at PLACE (joining, training, ending) of GENERATION until FOLDER/go exists. If the
others wait for it in torch, only rank $HELD_RANK is held. It raises once FOLDER/raise exists. The
generations before GENERATION fail by themselves.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

folder, place, generation = sys.argv[1:]
rank, now = os.environ["RANK"], os.environ["MESHRUN_GENERATION"]
is_holder = rank == os.environ["HELD_RANK"]


def announce():
    with open(f"{folder}/at~{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/at~{rank}", f"{folder}/at.{now}.{rank}")


def is_let_go():
    if is_holder and os.path.exists(f"{folder}/raise"):
        raise ValueError("the loss is nan")
    return os.path.exists(f"{folder}/go")


def reach(here):
    if (here, now) == (place, generation):
        announce()
        while is_holder and not is_let_go():
            time.sleep(0.01)


reach("joining")
if not dist.is_initialized():
    dist.init_process_group("gloo")
if now != generation and is_holder:
    raise ValueError("the first time")
if place == "training" and now == generation:
    announce()
done = torch.zeros(1)
while (place == "training" or now != generation) and not done.item():
    done = torch.tensor([float(is_let_go())])
    dist.all_reduce(done)
reach("ending")
