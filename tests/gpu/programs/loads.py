"""Load batches in workers started in each way, and share a CUDA tensor with a process."""

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, TensorDataset


def add_one(shared: torch.Tensor) -> None:
    """Change a tensor of another process."""
    shared += 1
    torch.cuda.synchronize()


if __name__ == "__main__":
    total = torch.zeros(1, device="cuda")  # before the workers start
    numbers = TensorDataset(torch.arange(64.0))
    for way in ("fork", "spawn", "forkserver"):
        loader = DataLoader(
            numbers, batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context=way
        )
        for (batch,) in loader:
            total += batch.cuda(non_blocking=True).sum()
    shared = torch.zeros(4, device="cuda")
    process = multiprocessing.get_context("spawn").Process(target=add_one, args=(shared,))
    process.start()
    process.join()
    print(f"loaded {total.item():g}, shared {shared.sum().item():g}", flush=True)
