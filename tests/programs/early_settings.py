"""Set variables before torch is imported, and print their effect."""

import os
import sys

os.environ["TORCH_LOGS"] = "dynamo"
os.environ.update({"PYTORCH_JIT": "0"}, TORCH_DISTRIBUTED_DEBUG="DETAIL")
for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_COMPILE_DISABLE"):
    os.environ.setdefault(name, sys.argv[1])
os.environ["OMP_NUM_THREADS"] = "2"
if "unclear" in sys.argv:
    os.environ["TORCHDYNAMO_VERBOSE"] = str(min(os.getpid(), 1))
if "hidden" in sys.argv:
    exec('os.environ["TORCHDYNAMO_VERBOSE"] = "1"')
    exec('os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"')  # as Lightning; read at each check
    exec('os.environ["KMP_INIT_AT_FORK"] = "FALSE"')  # as joblib, for the OpenMP of others

import logging

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist

os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"  # too late for any launcher
print(
    logging.getLogger("torch._dynamo").level,
    torch.jit._state._enabled.enabled,
    dist.get_debug_level(),
    torch._inductor.config.max_autotune,
    torch._dynamo.config.disable,
    torch._dynamo.config.verbose,
    torch.get_num_threads(),
)
if "mesh" in sys.argv:
    from meshrun import current_mesh

    print(current_mesh().shape)
# ruff: noqa: E402
