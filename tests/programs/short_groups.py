"""Create and destroy process groups repeatedly, in the way given by the argument."""

import os
import sys

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

how = sys.argv[1]
place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def connections():
    return len(psutil.Process().net_connections("tcp"))


def train(group=None):
    model = DistributedDataParallel(torch.nn.Linear(20, 4), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(32, 20)).sum().backward()
        optimizer.step()
    if how == "raise":
        raise ValueError
    if how != "keep":
        dist.destroy_process_group(group)


def train_once(**given):
    """The model is local to train(), and has the last reference to the group."""
    dist.init_process_group("gloo", **given)
    try:
        train()
    except ValueError:
        dist.destroy_process_group()


def held():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


if how in ("return", "raise"):
    for _ in range(5):
        train_once()
        train_once(**place)
    del os.environ["RANK"]
    train_once(**place)
elif how == "keep":
    dist.init_process_group("gloo")
    train()
elif how == "subgroups":
    dist.init_process_group("gloo")
    train(dist.new_group())
    before = held()
    for _ in range(30):
        train(dist.new_group())
    assert held() == before, (before, held())
elif how == "at once":
    init_device_mesh("cpu", (2, 2))
    up = connections()
    dist.destroy_process_group()
    assert connections() == up > 0  # kept for peers that are still connecting
    dist.init_process_group("gloo")
    assert connections() < 2 * up
print("done")
