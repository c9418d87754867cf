"""Whether ranks may be forks of this process: what its imports did that no fork can take along.

A fork has one thread of its parent's, and an accelerator's driver that was initialized in the
parent answers no call in it. The drivers' own words are asked where there are any: a flag such as
``torch.cuda.is_initialized()`` knows of torch's own use alone, and not of all of that.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrun.wording import count
from meshrun.worker.threads import count_threads

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci", "/dev/neuron")
"""How the files of accelerators begin: NVIDIA, AMD, DRM (Intel), the kernel's own class, Ascend,
Trainium."""
_MONITORS = {"/dev/nvidia": "libnvidia-ml.so", "/dev/dri/": "libamd_smi.so"}
"""Libraries that count and watch devices and keep their files open, which a fork may inherit."""
_FOR_COMPUTING = "/dev/nvidia-uvm"
"""The one of NVIDIA's that NVML leaves alone."""
_ASKED = {
    "cuda": "_cuda_isInBadFork",
    "xpu": "_xpu_isInBadFork",
    "mps": "_mps_is_in_bad_fork",
    "mtia": "_mtia_isInBadFork",
}


@contextmanager
def nvml_answers() -> Iterator[None]:
    """Have ``torch.cuda.is_available()`` ask NVML while the block runs, and not the driver.

    Many packages call it while they are imported. It asks the driver otherwise, which cannot be
    used in forks from then on. Ranks never see the variable, and what the user has set stays.
    """
    if _NVML_CHECK in os.environ:
        yield
        return
    os.environ[_NVML_CHECK] = "1"
    try:
        yield
    finally:
        if os.environ.get(_NVML_CHECK) == "1":
            del os.environ[_NVML_CHECK]


class ImportWatch:
    """Looks at this process after each import, to name the one after which it cannot fork."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        """What was found of each kind, as it was seen first."""
        self._imported: list[str] = []
        self._look("a startup hook of Python's, such as sitecustomize,")

    def imported(self, module: str) -> None:
        """Look at what the import of a module has left."""
        self._imported.append(f"`{module}`")
        self._look(f"importing `{module}`")

    def why_unsafe(self) -> str | None:
        """Return why ranks cannot be forks, as things are now, or ``None``."""
        for kind, sign in _signs().items():
            return self._first.get(kind, f"an import {sign}")
        refused = _refused_in_forks()
        if refused is None:
            return None
        others = [name for name in self._imported if not name.startswith("`torch")]
        return f"importing {' or '.join(others or self._imported)} {refused}"

    def _look(self, what: str) -> None:
        for kind, sign in _signs().items():
            self._first.setdefault(kind, f"{what} {sign}")


def _signs() -> dict[str, str]:
    """Return what tells without a fork that one would be unsafe, by its kind."""
    found: dict[str, str] = {}
    if _is_cuda_initialized():
        found["cuda"] = "initialized CUDA"
    if files := open_devices():
        found["files"] = f"opened {files[0]}"
    if (threads := count_threads() - 1) > 0:
        found["threads"] = f"started {count(threads, 'thread')}"
    return found


def _is_cuda_initialized() -> bool:
    """Whether anything in this process has called ``cuInit``.

    torch maps the driver where there is one, which is harmless. Before ``cuInit`` the driver
    refuses to count devices (CUDA driver API: CUDA_ERROR_NOT_INITIALIZED), and changes nothing.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)
    except (OSError, AttributeError):
        return False


def open_devices(process: Path = Path("/proc/self")) -> list[str]:
    """Return the files of accelerators that a process has open, but for what monitors keep."""
    found: list[str] = []
    try:
        numbers = os.listdir(process / "fd")
    except OSError:
        return found
    for number in numbers:
        try:
            path = os.readlink(process / "fd" / number)
        except OSError:  # what listed them
            continue
        if path.startswith(_DEVICES) and not _is_monitored(path, process):
            found.append(path)
    return sorted(found)


def _is_monitored(path: str, process: Path) -> bool:
    if path.startswith(_FOR_COMPUTING):
        return False
    libraries = [name for folder, name in _MONITORS.items() if path.startswith(folder)]
    return bool(libraries) and libraries[0] in (process / "maps").read_text()


def ask_fork(question: Callable[[], int]) -> int:
    """Return what a fork of this process finds, 0 to 255; -N if signal N kills it.

    Whatever the question initializes is initialized in the fork alone. 255 if the question fails.
    """
    pid = os.fork()
    if pid == 0:
        answer = 255
        try:
            answer = question()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _refused_in_forks() -> str | None:
    """Return what an import did if torch then refuses a device to forks; a fork is asked.

    torch's own answer is there in forks alone. A build for the CPU has nothing to ask.
    """
    questions = _questions()
    if not questions:
        return None

    def place_of_refused() -> int:
        answers = [is_refused() for is_refused in questions.values()]
        return answers.index(True) + 1 if True in answers else 0

    code = ask_fork(place_of_refused)
    if code < 0:
        return f"left a process whose forks are killed by signal {-code}"
    if code > 0:
        device = [*questions][code - 1]
        return f"used {device}, which torch then refuses in forks"
    return None


def _questions() -> dict[str, Callable[[], bool]]:
    """Return what each device type that torch knows is asked in a fork."""
    torch = sys.modules.get("torch")
    binding = getattr(torch, "_C", None)
    if binding is None:
        return {}
    found = {device: getattr(binding, name, None) for device, name in _ASKED.items()}
    for device, is_built in (("mps", binding._has_mps), ("mtia", binding._mtia_isBuilt())):
        if not is_built:  # every build has the functions
            del found[device]
    outside = binding._get_privateuse1_backend_name()
    found[outside] = getattr(getattr(torch, outside, None), "_is_in_bad_fork", None)
    return {device: ask for device, ask in found.items() if callable(ask)}
