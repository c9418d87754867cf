"""Train, and let one rank fail in the way given by the arguments: ``failing.py 2 raise``.

The others continue to the next collective and wait there.
"""

import ctypes
import mmap
import os
import resource
import signal
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


def step():
    total = torch.ones(1000)
    dist.all_reduce(total)
    return float(total[0])


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if sys.argv[2] == "worker-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("sample 0 is corrupt")


def load():
    for _ in DataLoader(Broken(), num_workers=1, multiprocessing_context="fork"):
        pass


def raise_here():
    raise ValueError("the loss is nan")  # between collectives


def raise_in_a_collective():
    dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)


def raise_what_torch_would_say():
    raise RuntimeError("Connection closed by peer")


def save_to_a_full_disk():
    torch.save({"weights": torch.ones(1 << 20)}, "/dev/full")


def abort():
    ctypes.CDLL(None).abort()


def write_to_full_shared_memory():
    with open("/dev/shm/meshrun_test", "wb+") as file:
        os.unlink(file.name)
        file.truncate(1 << 26)
        mmap.mmap(file.fileno(), 1 << 26)[:] = bytes(1 << 26)


def use_all_memory():
    keep = []
    while True:
        keep.append(bytearray(b"x") * (1 << 26))


def limit_memory():
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 28), -1))


def reach_the_limit():
    limit_memory()
    bytearray(1 << 32)


def reach_the_limit_in_torch():
    limit_memory()
    torch.ones(1 << 30)


WAYS = {
    "raise": raise_here,
    "inside": raise_in_a_collective,
    "own-words": raise_what_torch_would_say,
    "no-space": save_to_a_full_disk,
    "segfault": lambda: ctypes.string_at(0),
    "abort": abort,
    "bus": write_to_full_shared_memory,
    "memory": use_all_memory,
    "rlimit": reach_the_limit,
    "rlimit-torch": reach_the_limit_in_torch,
    "worker": load,
    "worker-killed": load,
    "exit": lambda: sys.exit(3),
    "text": lambda: sys.exit("the data set is not there"),
    "leave": sys.exit,
    "leave-at-once": lambda: os._exit(0),
}


def fail(way):
    if way.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, way))
        signal.pause()
    WAYS[way]()
    raise AssertionError(f"{way} went well")


def main():
    who, way = sys.argv[1:]
    guilty = dist.get_rank() == int(who) if who != "all" else True
    if guilty and way == "first-thing":
        raise ValueError("the loss is nan")  # the first thing it does
    for _ in range(3):
        step()
    if way == "alike":
        assert step() == 0.0, "the loss is nan"
    if guilty:
        fail(way)
    for _ in range(3):
        step()


if __name__ == "__main__":  # DataLoader workers may import this file again
    main()
