"""Print which GPUs a rank sees before it has touched one."""

import os

import torch

print(f"initialized={torch.cuda.is_initialized()}", flush=True)
names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
print(*(f"{name}={os.environ.get(name)}" for name in names), flush=True)
device = torch.cuda.current_device()
uuid = torch.cuda.get_device_properties(device).uuid
print(f"device {device} of {torch.cuda.device_count()}, {uuid}", flush=True)
