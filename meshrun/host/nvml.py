"""NVIDIA's management library, through ctypes, and questions to it in a process of its own.

Its calls may never return. Unavailable values are ``None`` or empty.

Source:
    nvml.h and the NVML API reference. Structs have the layout of 64-bit Linux.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from meshrun.errors import HostError
from meshrun.host.forked_call import ForkedCall
from meshrun.host.machine import Gpu
from meshrun.host.stderr import note as note_on_stderr

_LIBRARY = "libnvidia-ml.so.1"
_NO_SUCH_VALUE = 2**64 - 1
_MEMORY = struct.Struct("=I4x4Q")
"""Version, total, reserved, free, used. Version 1 counts memory reserved by the driver as used:
half a gigabyte on an idle H100."""
_FABRIC_V2 = struct.Struct("=I16sIIB3xI")
"""Version, UUID of the cluster, status, clique, state, health (``nvmlGpuFabricInfo_v2_t``)."""
_FABRIC_COMPLETED = 3
_PROCESS = struct.Struct("=I4xQII")
"""Pid, bytes, and the two numbers of a MIG instance."""
_MOST_PROCESSES = 256
_NO_PERMISSION = 4
_LONGEST_TEXT = 96
_INIT_ERRORS = {
    9: "its kernel module is not loaded",
    18: "its library and its kernel module have different versions",
}
Handle = ctypes.c_void_p
"""The library's handle of a GPU or a MIG instance."""
T = TypeVar("T")
_SLOW_S = 5.0
"""Longer than most drivers take to initialize GPUs that no process uses."""
_MOST_S = 120.0
_GLANCE_S = 1.0
"""How long a running launch waits; its ranks' output waits, too."""


class GpuProcess(Struct, frozen=True):
    """A process with memory on a GPU."""

    pid: int
    used_bytes: int | None
    """``None`` if unavailable, as for processes of other users in a container."""


class Nvml:
    """The initialized library. Calls of functions that this driver lacks fail."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, function: str, *arguments: Any) -> bool:
        """Call a function of the library; return whether it succeeded."""
        return self._code(function, *arguments) == 0

    def _code(self, function: str, *arguments: Any) -> int | None:
        try:
            return int(getattr(self._library, function)(*arguments))
        except AttributeError:  # an older driver
            return None

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        """Return the number that a function yields."""
        value = kind(0)
        return value.value if self.call(function, *arguments, ctypes.byref(value)) else None

    def numbers(self, function: str, gpu: Handle, count: int) -> tuple[int, ...] | None:
        """Return the numbers that a function yields for a GPU."""
        values = [ctypes.c_uint(0) for _ in range(count)]
        if not self.call(function, gpu, *(ctypes.byref(value) for value in values)):
            return None
        return tuple(value.value for value in values)

    def text(self, function: str, *arguments: Any) -> str:
        """Return the string that a function yields."""
        buffer = ctypes.create_string_buffer(_LONGEST_TEXT)
        if not self.call(function, *arguments, buffer, ctypes.c_uint(_LONGEST_TEXT)):
            return ""
        return buffer.value.decode(errors="replace")

    def gpus(self) -> dict[int, Handle | None]:
        """Return the GPUs that this process may use, by number; ``None`` if one does not answer."""
        found: dict[int, Handle | None] = {}
        for index in range(self.number("nvmlDeviceGetCount_v2") or 0):
            place, handle = ctypes.c_uint(index), Handle()
            code = self._code("nvmlDeviceGetHandleByIndex_v2", place, ctypes.byref(handle))
            if code != _NO_PERMISSION:
                found[index] = handle if code == 0 else None
        return found

    def whole_gpu(self, gpu: Gpu) -> Handle | None:
        """Return a GPU; for a MIG instance, the GPU that it is a part of."""
        found = None
        if gpu.address is not None:
            found = self._handle("nvmlDeviceGetHandleByPciBusId_v2", gpu.address.encode())
        if found is None and gpu.uuid:  # some sandboxes hide addresses
            found = self.gpu_of(gpu.uuid)
            name = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
            found = self._handle(name, found) or found if found is not None else None
        return found

    def gpu_of(self, uuid: str) -> Handle | None:
        """Return the GPU or MIG instance with a UUID."""
        return self._handle("nvmlDeviceGetHandleByUUID", uuid.encode())

    def address(self, gpu: Handle) -> str | None:
        """Return a GPU's PCI address."""
        return self.pci_address("nvmlDeviceGetPciInfo_v3", gpu)

    def pci_address(self, function: str, *arguments: Any) -> str | None:
        """Return the PCI address that a function yields.

        ``nvmlPciInfo_t`` is 68 bytes, with domain, bus and device as unsigned ints from byte 16.
        """
        info = ctypes.create_string_buffer(68)
        if not self.call(function, *arguments, info):
            return None
        domain, bus, device = struct.unpack_from("=3I", info.raw, 16)
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def mig_instances(self, gpu: Handle) -> list[Handle]:
        """Return the MIG instances of a GPU; none if MIG is off or not supported."""
        mode = self.numbers("nvmlDeviceGetMigMode", gpu, 2)
        if mode is None or not mode[0]:
            return []
        most = self.number("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0
        name = "nvmlDeviceGetMigDeviceHandleByIndex"
        found = (self._handle(name, gpu, ctypes.c_uint(index)) for index in range(most))
        return [instance for instance in found if instance is not None]

    def fabric(self, gpu: Handle) -> str:
        """Return the multi-node NVLink domain of a GPU, ``<cluster UUID>/<clique>``, or "".

        GPUs with the same UUID and clique reach each other by NVLink. A GPU whose NVLinks do not
        leave the node has a UUID of zeros.
        """
        size = _FABRIC_V2.size
        info = ctypes.create_string_buffer(struct.pack("=I", size | 2 << 24), size)
        if not self.call("nvmlDeviceGetGpuFabricInfoV", gpu, info):
            return ""
        _, uuid, status, clique, state, _ = _FABRIC_V2.unpack(info.raw)
        is_ready = status == 0 and state == _FABRIC_COMPLETED and any(uuid)
        return f"{uuid.hex()}/{clique}" if is_ready else ""

    def used_bytes(self, gpu: Handle) -> int | None:
        """Return the memory in use by all processes, without the driver's."""
        info = ctypes.create_string_buffer(_MEMORY.pack(_MEMORY.size | 2 << 24, 0, 0, 0, 0))
        if not self.call("nvmlDeviceGetMemoryInfo_v2", gpu, info):
            return None
        return int(_MEMORY.unpack_from(info.raw)[4])

    def processes(self, gpu: Handle) -> list[GpuProcess]:
        """Return the processes with memory on a GPU, as far as visible in this container."""
        found: dict[int, GpuProcess] = {}
        for kind in ("Compute", "Graphics"):
            count = ctypes.c_uint(_MOST_PROCESSES)
            infos = ctypes.create_string_buffer(_PROCESS.size * _MOST_PROCESSES)
            function = f"nvmlDeviceGet{kind}RunningProcesses_v3"
            if not self.call(function, gpu, ctypes.byref(count), infos):
                continue
            for index in range(min(count.value, _MOST_PROCESSES)):
                pid, used, *_ = _PROCESS.unpack_from(infos.raw, index * _PROCESS.size)
                found[pid] = GpuProcess(pid, None if used == _NO_SUCH_VALUE else used)
        return list(found.values())

    def _handle(self, function: str, *arguments: Any) -> Handle | None:
        handle = Handle()
        return handle if self.call(function, *arguments, ctypes.byref(handle)) else None


def has_nvml() -> bool:
    """Return whether the library is installed; does not call the driver."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def load_nvml() -> Nvml | None:
    """Return the initialized library; ``None`` without a working driver."""
    try:
        nvml = Nvml(ctypes.CDLL(_LIBRARY))
    except OSError:
        return None
    return nvml if nvml.call("nvmlInit_v2") else None


def why_no_nvml() -> tuple[str, bool]:
    """Return (why :func:`load_nvml` returns ``None``, whether a driver is installed)."""
    try:
        code = int(ctypes.CDLL(_LIBRARY).nvmlInit_v2())
    except (OSError, AttributeError):
        return f"{_LIBRARY} is not installed", False
    return _INIT_ERRORS.get(code, f"NVML returned error {code}"), True


@contextmanager
def open_nvml() -> Iterator[Nvml | None]:
    """Provide the library, or ``None``, for the block."""
    nvml = load_nvml()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.call("nvmlShutdown")


def read_driver_version(nvml: Nvml | None) -> str:
    """Return the version of NVIDIA's driver, "" without a driver."""
    return "" if nvml is None else nvml.text("nvmlSystemGetDriverVersion")


class Driver:
    """Asks the driver questions, one at a time: while one has no answer, others get none.

    After a crash, it is not asked again. If it does not answer, ``note`` prints that.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._next_note_s = note, _SLOW_S
        self._asked: ForkedCall[Any] | None = None
        self._has_crashed = False
        self.trouble = ""
        """Why the last question got no answer; "" if it got one."""

    def ask(self, read: Callable[[Nvml | None], T], *, most_s: float = _GLANCE_S) -> T | None:
        """Return what ``read`` returns for NVML; ``None`` without an answer within ``most_s``."""
        if self._asked is not None:
            self._take(0.0)
        if self._asked is not None or self._has_crashed:
            return None
        if not has_nvml():
            return read(None)
        try:
            self._asked = ForkedCall(partial(_read, read))
        except OSError as error:
            self.trouble = f"cannot ask the NVIDIA driver: {error.strerror}"
            return None
        return self._take(most_s)  # type: ignore[no-any-return]

    def _take(self, most_s: float) -> Any:
        assert self._asked is not None  # noqa: S101 - the callers check this
        until_s = self._asked.age_s + most_s
        while not self._asked.wait(min(until_s, self._next_note_s) - self._asked.age_s):
            age_s = self._asked.age_s
            self.trouble = f"the NVIDIA driver has not answered for {age_s:.0f} s"
            if age_s >= self._next_note_s:
                self._next_note_s *= 2
                self._note(self.trouble)
            if age_s >= until_s:
                return None
        asked, self._asked = self._asked, None
        answer, self.trouble = asked.take(), ""
        if self._next_note_s > _SLOW_S:
            self._note(f"the NVIDIA driver answered after {asked.age_s:.0f} s")
            self._next_note_s = _SLOW_S
        if asked.killed_by is not None:
            self._has_crashed = True
            self.trouble = f"the NVIDIA driver's library crashed with signal {asked.killed_by}"
        return answer

    def close(self) -> None:
        """Stop waiting for an answer."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None


def ask_driver(read: Callable[[Nvml | None], T]) -> T:
    """Return what ``read`` returns for NVML, with notes on stderr while there is no answer.

    Raises:
        HostError: If there is none.
    """
    driver = Driver(note_on_stderr)
    answer = driver.ask(read, most_s=_MOST_S)
    driver.close()
    if driver.trouble:
        raise HostError(
            driver.trouble,
            hint="see `nvidia-smi` and the kernel log; --mesh with --device cpu needs no driver",
        )
    return answer  # type: ignore[return-value]


def _read(read: Callable[[Nvml | None], T]) -> T:
    with open_nvml() as nvml:
        return read(nvml)
