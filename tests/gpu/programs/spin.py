"""Wait for a kernel that runs for about an hour."""

import torch

torch.cuda._sleep(1)
torch.cuda._sleep(10**13)
print("up", flush=True)
torch.cuda.synchronize()
