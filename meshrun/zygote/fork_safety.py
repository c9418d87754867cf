"""Decides whether ranks may be forks of this process, after all its imports.

Only the forking thread survives in a fork, and an accelerator's driver that was initialized in the
parent does not work there. Where possible the driver itself is asked: a flag such as
``torch.cuda.is_initialized()`` covers only torch's own use, and not even all of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from meshrun.host.printable import one_line
from meshrun.host.visibility import CUDA
from meshrun.wording import count
from meshrun.worker.imports import when_imported

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_FAILED = 255
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci", "/dev/neuron")
"""Device files of NVIDIA, AMD, DRM (Intel), the kernel's own class, Ascend and Trainium."""
_MONITORS = {"/dev/nvidia": "libnvidia-ml.so", "/dev/dri/": "libamd_smi.so"}
"""Libraries that only monitor devices. They keep the files open, and a fork may inherit those.

Computing opens the same files, ``/dev/nvidia-uvm`` included; whether it did, the driver tells.
"""
_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that forks may lack.

Source:
    jemalloc, ``background_thread_postfork_child()``. pyarrow contains it.
"""
_BAD_FORK_CHECKS = {
    "cuda": "_cuda_isInBadFork",
    "xpu": "_xpu_isInBadFork",
    "mps": "_mps_is_in_bad_fork",
    "mtia": "_mtia_isInBadFork",
}


@contextmanager
def nvml_based_cuda_check() -> Iterator[None]:
    """Make ``torch.cuda.is_available()`` ask NVML instead of the driver while the block runs.

    Many packages call it on import. Asking the driver would make it unusable in forks, and NVML
    starts a thread (driver 580), so it is asked in forks. Ranks never see the variable, and a value
    that the user has set is kept.
    """
    is_users = _NVML_CHECK in os.environ
    os.environ.setdefault(_NVML_CHECK, "1")
    try:
        with ExitStack() as block:
            patch = partial(_count_in_forks, block)
            block.callback(when_imported("torch.cuda", patch))
            yield
    finally:
        if not is_users and os.environ.get(_NVML_CHECK) == "1":
            del os.environ[_NVML_CHECK]


def _count_in_forks(block: ExitStack) -> None:
    """Have torch call NVML only in forks until the end of a block.

    Should a newer torch count devices in another way, NVML's thread will be found.
    """
    cuda = sys.modules["torch.cuda"]
    name = "_device_count_nvml"
    if not hasattr(cuda, name):
        return

    @cache
    def count_devices(_visible: str | None) -> int:
        number = call_in_fork(here)
        return number if 0 <= number < _FAILED else -1  # as torch's function

    here = getattr(cuda, name)
    setattr(cuda, name, lambda: count_devices(os.environ.get(CUDA)))
    block.callback(setattr, cuda, name, here)


class ImportWatch:
    """Examines this process after each import, to name the import that makes forks unsafe."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        """The first sign of each kind, with the import that caused it."""
        self._imported: list[str] = []
        self._examine("a Python startup hook, such as sitecustomize,")

    def imported(self, module: str) -> None:
        """Examine the process after the import of a module."""
        self._imported.append(f"`{module}`")
        self._examine(f"importing `{module}`")

    def why_unsafe(self) -> str | None:
        """Return why ranks cannot be forks of this process as it is now, or ``None``."""
        for kind, sign in _signs().items():
            return self._first.get(kind, f"an import {sign}")
        refused = _refused_in_forks()
        if refused is None:
            return None
        others = [name for name in self._imported if not name.startswith("`torch")]
        return f"importing {' or '.join(others or self._imported)} {refused}"

    def _examine(self, cause: str) -> None:
        for kind, sign in _signs().items():
            self._first.setdefault(kind, f"{cause} {sign}")


def _signs() -> dict[str, str]:
    """Return the signs, by kind, that a fork would be unsafe; found without forking."""
    found: dict[str, str] = {}
    if _is_cuda_initialized():
        found["cuda"] = "initialized CUDA"
    if files := open_devices():
        found["files"] = f"opened {files[0]}"
    if threads := other_threads():
        names = sorted({*threads} - {""})
        named = f" ({', '.join(names)})" if names else ""
        found["threads"] = f"started {count(len(threads), 'thread')}{named}"
    return found


def other_threads(process: Path = Path("/proc/self")) -> list[str]:
    """Return the names of a process's threads but the first and those that a fork may lack.

    A thread that was not named has the name of the first, here "".
    """
    names: dict[str, str] = {}
    with suppress(OSError):  # where the system does not show threads (macOS)
        for thread in os.listdir(process / "task"):
            with suppress(OSError):  # it has ended
                comm = (process / "task" / thread / "comm").read_text("utf-8", "replace")
                names[thread] = one_line(comm.strip())
    own = names.pop(process.resolve().name, "")
    others = [name for name in names.values() if name not in _SAFE_THREADS]
    return ["" if name == own else name for name in others]


def _is_cuda_initialized() -> bool:
    """Return whether anything in this process has called ``cuInit``.

    torch loads the driver if there is one, which is harmless. Until ``cuInit`` is called, the
    driver refuses to count devices (CUDA driver API: CUDA_ERROR_NOT_INITIALIZED), without side
    effects.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
    except (OSError, AttributeError):
        return False


def open_devices(process: Path = Path("/proc/self")) -> list[str]:
    """Return the device files that a process has open, except those that monitors keep open."""
    found: list[str] = []
    with suppress(OSError):  # of an interpreter with capabilities, only root may list them
        for number in os.listdir(process / "fd"):
            with suppress(OSError):  # the descriptor that listed the folder
                path = os.readlink(process / "fd" / number)
                if path.startswith(_DEVICES) and not _is_monitored(path, process):
                    found.append(path)
    return sorted(found)


def _is_monitored(path: str, process: Path) -> bool:
    libraries = [name for folder, name in _MONITORS.items() if path.startswith(folder)]
    return bool(libraries) and libraries[0] in (process / "maps").read_text("utf-8", "replace")


def call_in_fork(function: Callable[[], int]) -> int:
    """Call a function in a fork of this process, so that what it initializes stays there.

    Returns:
        The result, 0 to 254; 255 if the function raised, -N if signal N killed the fork.
    """
    pid = os.fork()
    if pid == 0:
        result = _FAILED
        try:
            result = function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(result)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _refused_in_forks() -> str | None:
    """Return what an import did to make torch refuse a device in forks, or ``None``.

    torch's checks work only in a fork. A build for the CPU has none.
    """
    checks = _bad_fork_checks()
    if not checks:
        return None

    def first_refused() -> int:  # counted from 1; 0 for none
        refused = [is_refused() for is_refused in checks.values()]
        return refused.index(True) + 1 if True in refused else 0

    code = call_in_fork(first_refused)
    if code < 0:
        return f"left a process whose forks are killed by signal {-code}"
    if code > len(checks):
        return "left a process in whose forks torch's checks fail"
    if code > 0:
        device = [*checks][code - 1]
        return f"used {device}, which torch then refuses in forks"
    return None


def _bad_fork_checks() -> dict[str, Callable[[], bool]]:
    """Return torch's check for each device type: whether it refuses the device in this fork."""
    torch = sys.modules.get("torch")
    binding = getattr(torch, "_C", None)
    if binding is None:
        return {}
    found = {device: getattr(binding, name, None) for device, name in _BAD_FORK_CHECKS.items()}
    for device, is_built in (("mps", binding._has_mps), ("mtia", binding._mtia_isBuilt())):
        if not is_built:  # every build has these two functions
            del found[device]
    outside = binding._get_privateuse1_backend_name()
    found[outside] = getattr(getattr(torch, outside, None), "_is_in_bad_fork", None)
    return {device: check for device, check in found.items() if callable(check)}
