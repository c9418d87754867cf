"""Fail on the GPU: ``fault.py memory|address|assert``."""

import ctypes
import sys

import torch

STORE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry store()
{
    .reg .u64 %at;
    mov.u64 %at, 16;
    st.volatile.global.u64 [%at], %at;
    ret;
}
"""
"""A kernel that writes to an unmapped address. The driver compiles it, so no toolkit is needed."""


def launch(source: bytes, name: bytes) -> None:
    """Start one thread of a kernel in torch's context, through the driver."""
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    ones = [ctypes.c_uint(1)] * 6
    for answer in (
        driver.cuModuleLoadData(ctypes.byref(module), source),
        driver.cuModuleGetFunction(ctypes.byref(kernel), module, name),
        driver.cuLaunchKernel(kernel, *ones, ctypes.c_uint(0), None, None, None),
    ):
        assert answer == 0, f"the driver returned {answer}"


match sys.argv[1]:
    case "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    case "address":
        launch(STORE, b"store")
        torch.cuda.synchronize()
    case "assert":
        torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")]
        torch.cuda.synchronize()
