"""A back end outside torch that torch loads by itself: devices of the type `sim`, simulated.

There are SIM_DEVICES of them, 2 unless that is set. Like a real driver, theirs is of no use to a
fork of the process that has initialized it.
"""

import os

import torch.distributed as dist
from torch.utils.backend_registration import (
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)


class Sim:
    """What is ``torch.sim``."""

    def __init__(self):
        self._initialized_in = None
        self._current = 0

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

    def current_device(self):
        return self._current

    def set_device(self, index):
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"sim: invalid device ordinal {index}")
        self._current = index

    def manual_seed_all(self, seed):
        pass


def _make_group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def autoload():
    """Register the device type, and the back end of its groups."""
    _setup_privateuseone_for_python_backend(
        "sim", Sim(), _DummyPrivateUse1Hook(), _DummyDeviceGuard()
    )
    dist.Backend.register_backend("simccl", _make_group, devices=["sim"])
