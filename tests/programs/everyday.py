"""Typical programs, one per function: everyday.py NAME. A rank that succeeds prints ``well``."""

import atexit
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

FOLDER = os.environ.get("FOLDER", "")
RANK = os.environ.get("RANK", "")


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def square(number):
    return number * number


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def loader():
    data = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DistributedDataParallel(nn.Linear(8, 1))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=4, sampler=sampler, num_workers=2):
            model(batch).sum().backward()


def loader_left_half_way():
    batches = DataLoader(Numbers(), num_workers=2, persistent_workers=True, pin_memory=True)
    globals()["kept"] = iterator = iter(batches)
    next(iterator)


def loader_of_new_interpreters():
    for method in ("spawn", "forkserver"):
        batches = DataLoader(Numbers(), num_workers=1, multiprocessing_context=method)
        assert len(list(batches)) == 32


def checkpoints():
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    fully_shard(model := nn.Linear(8, 8))
    train(model)
    checkpoint.save(model.state_dict(), checkpoint_id=f"{FOLDER}/saved")
    checkpoint.load(model.state_dict(), checkpoint_id=f"{FOLDER}/saved")
    checkpoint.async_save({"step": torch.ones(1)}, checkpoint_id=f"{FOLDER}/later")


def saved_by_the_first():
    if RANK == "0":
        torch.save(nn.Linear(8, 8).state_dict(), f"{FOLDER}/model.pt")
    dist.barrier()
    nn.Linear(8, 8).load_state_dict(torch.load(f"{FOLDER}/model.pt"))
    if RANK != "0":
        sys.exit()


def compiled():
    train(DistributedDataParallel(torch.compile(nn.Linear(8, 8), backend="aot_eager")))


def pools():
    with multiprocessing.Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
    globals()["kept"] = ProcessPoolExecutor(1)
    assert globals()["kept"].submit(square, 3).result() == 9
    multiprocessing.Manager().dict()


def threads():
    for target, daemon in (
        (time.sleep, False),
        (dist.get_rank, False),
        (spin, True),
        (churn, True),
    ):
        words = (0.2,) if target is time.sleep else ()
        threading.Thread(target=target, args=words, daemon=daemon).start()
    threading.Thread(target=sys.exit, args=(4,)).start()
    ThreadPoolExecutor(1).submit(time.sleep, 0.1)


def spin():
    while True:
        time.sleep(0.001)
        torch.ones(8).sum().item()


def churn():
    while True:
        sum(range(1000))


def exit_handlers():
    globals()["kept"] = tempfile.TemporaryDirectory()
    atexit.register(dist.destroy_process_group)
    atexit.register(dist.barrier)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    faulthandler.dump_traceback_later(600, exit=True)


def subprocesses():
    words = [sys.executable, "-c", "import os; print(os.environ['RANK'])"]
    assert subprocess.check_output(words, text=True).strip() == RANK
    assert os.system("true") == 0
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)


def forks():
    for end, code in (("raise", 1), ("exit", 7), ("return", 0)):
        if (pid := os.fork()) == 0:
            globals()["kept"] = open(f"{FOLDER}/{end}{RANK}", "w")
            globals()["kept"].write("kept")
            if end == "raise":
                raise ValueError(f"in a child of rank {RANK}")
            sys.exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        assert open(f"{FOLDER}/{end}{RANK}").read() == "kept"


def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = PipelineStage(nn.Linear(8, 8), rank, last + 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    given = (torch.randn(8, 8),) if rank == 0 else ()
    schedule.step(*given, **({"target": torch.randn(8, 8), "losses": []} if rank == last else {}))


def remote_calls():
    from torch.distributed import rpc

    rpc.init_rpc(f"worker{RANK}", rank=dist.get_rank(), world_size=dist.get_world_size())
    assert rpc.rpc_sync("worker0", square, (3,)) == 9
    rpc.shutdown()


def objects():
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, {"rank": dist.get_rank()})
    dist.broadcast_object_list(answers)
    dist.monitored_barrier(wait_all_ranks=True)
    dist.new_subgroups(1)
    globals()["kept"] = [dist.all_reduce(torch.ones(99), async_op=True) for _ in range(9)]


def uneven():
    with (model := DistributedDataParallel(nn.Linear(8, 8))).join():
        train(model, 3 + dist.get_rank())
    with model.no_sync():
        train(model, 1)


def sharded_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()


def profiled():
    with torch.profiler.profile(record_shapes=True, with_stack=True) as profile:
        train(DistributedDataParallel(nn.Linear(8, 8)))
    profile.export_chrome_trace(f"{FOLDER}/trace{RANK}.json")


def again_and_again():
    for _ in range(5):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.barrier()


def left_by_os_exit():
    dist.barrier()
    print("well", flush=True)
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    print("well", flush=True)
