import torch
import torch.distributed as dist

rank = dist.get_rank()
x = rank * 10
print("begin", rank)
breakpoint()
total = torch.tensor([x])
dist.all_reduce(total)
print("total", total.item())
