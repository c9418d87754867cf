"""Count the kernels that torch's profiler has seen on the GPU."""

import torch
from torch.profiler import ProfilerActivity, profile

values = torch.randn(512, 512, device="cuda")
with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
    for _ in range(5):
        values = values @ values
    torch.cuda.synchronize()
kernels = [event for event in profiled.events() if event.device_type.name == "CUDA"]
print("kernels", len(kernels) >= 5, flush=True)
