"""A back end outside torch that torch loads by itself: simulated devices of the type `sim`.

There are SIM_DEVICES of them, 2 by default. Like a real driver, theirs is of no use to a fork of
the process that has initialized it. If SIM_LIBRARY names the compiled `sim.cpp`, they have memory
and kernels, and are set with torch.accelerator alone.
"""

import os

import torch
import torch.distributed as dist
from torch.utils.backend_registration import (
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)


class Driver:
    """Counts the devices."""

    def __init__(self):
        self._initialized_in = None

    def _is_in_bad_fork(self):
        return self._initialized_in not in (None, os.getpid())

    def is_initialized(self):
        return self._initialized_in == os.getpid()

    def is_available(self):
        return self.device_count() > 0

    def device_count(self):
        if self._is_in_bad_fork():
            raise RuntimeError("Cannot re-initialize sim in forked subprocess")
        self._initialized_in = os.getpid()
        return int(os.environ.get("SIM_DEVICES", "2"))

    def manual_seed_all(self, seed):
        pass


class Sim(Driver):
    """Devices without a library, one of which is the current one."""

    def __init__(self):
        super().__init__()
        self._current = 0

    def current_device(self):
        return self._current

    def set_device(self, index):
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"sim: invalid device ordinal {index}")
        self._current = index


def _make_group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def autoload():
    """Register the device type, and the back end of its groups."""
    if library := os.environ.get("SIM_LIBRARY"):
        torch.utils.rename_privateuse1_backend("sim")
        torch.ops.load_library(library)
        torch._register_device_module("sim", Driver())
        torch.utils.generate_methods_for_privateuse1_backend()
    else:
        hook, guard = _DummyPrivateUse1Hook(), _DummyDeviceGuard()
        _setup_privateuseone_for_python_backend("sim", Sim(), hook, guard)
    dist.Backend.register_backend("simccl", _make_group, devices=["sim"])
