"""Fail on the GPU: ``fault.py memory|address|assert``."""

import sys

import torch

match sys.argv[1]:
    case "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    case "address":
        store = 'extern "C" __global__ void store(float *to) { ((volatile float *)16)[0] = 1.0f; }'
        kernel = torch.cuda._compile_kernel(store, "store")
        kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[torch.zeros(1, device="cuda")])
        torch.cuda.synchronize()
    case "assert":
        torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")]
        torch.cuda.synchronize()
