"""The memory in use on each GPU, its health, and its errors in the kernel log (XIDs)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from meshrun.host.gpus import MOST_NVLINKS, nvlink_state
from meshrun.host.machine import Gpu
from meshrun.host.nvml import Driver, GpuProcess, Handle, Nvml
from meshrun.host.printable import first_words, one_line
from meshrun.host.process_state import is_below, process_name
from meshrun.wording import size

_UNCORRECTED, _SINCE_RESET = ctypes.c_uint(1), ctypes.c_uint(0)
KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
"""Buffer size: each read returns one record, and fails if the record is longer."""
_JOURNAL = ("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat")
_JOURNAL_TAKES_S = 10.0
_XID = re.compile(
    r"(?:\d+,[^;]*;)?NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-f:]+)[^)]*\): (?P<number>\d+)"
    r"(?:, pid=[^,]*)?(?:, name=[^,]*)?(?:, (?:Ch|channel) [0-9a-fx]+)?(?:, intr [0-9a-f]+\.?)?"
    r"(?:,? (?P<text>.*))?",
    re.IGNORECASE,
)
"""A record of /dev/kmsg, or a message of the journal. Within other messages, the same text may be a
name that any user has chosen, such as that of a control group that ran out of memory."""
_LONGEST = 160
_FATAL = frozenset({46, 48, 62, 64, 74, 79, 95, 119, 120, 140})
"""XIDs after which a GPU must be reset or replaced before anything can run on it.

Source:
    NVIDIA, "Analyzing Xid Errors with the Xid Catalog" and "Health Validation, Xid Checks".
"""
_RECOVERY = 154
_NEEDS_RECOVERY = re.compile(r" to 0x0*[1-9a-f]", re.IGNORECASE)
"""A match in the text of XID 154 means that a reset, a reboot or draining the node is needed."""


class Holder(Struct, frozen=True, kw_only=True):
    """A process with memory on a GPU."""

    pid: int
    name: str
    """Empty if the process is not visible: it is in another container, or has ended."""
    used_bytes: int | None
    is_ours: bool
    """Whether this launch started it."""

    def __str__(self) -> str:
        used = "" if self.used_bytes is None else f" {size(self.used_bytes)}"
        if not self.name:
            return f"pid {self.pid}{used}, exited or in another container"
        return f"pid {self.pid} ({self.name}){used}, {'' if self.is_ours else 'not '}of this launch"


class GpuUse(Struct, frozen=True, kw_only=True):
    """The memory in use on a GPU."""

    gpu: Gpu
    used_bytes: int
    holders: tuple[Holder, ...] = ()

    def __str__(self) -> str:
        who = "; ".join(map(str, self.holders)) or "no process visible to NVML"
        return f"GPU {self.gpu.label} has {size(self.used_bytes)} in use ({who})"


def read_use(
    nvml: Nvml | None,
    gpus: Sequence[Gpu],
    *,
    with_holders: bool = True,
    roots: Sequence[int] = (),
) -> list[GpuUse]:
    """Return the memory in use on each GPU that answers, and who holds it.

    Processes below ``roots`` belong to this launch.
    """
    if nvml is None:
        return []
    found = []
    for gpu in gpus:
        handle = nvml.gpu_of(gpu.uuid) if gpu.uuid else None
        used = None if handle is None else nvml.used_bytes(handle)
        if handle is not None and used is not None:
            processes = nvml.processes(handle) if with_holders else ()
            holders = tuple(_holder(process, roots) for process in processes)
            found.append(GpuUse(gpu=gpu, used_bytes=used, holders=holders))
    return found


def _holder(process: GpuProcess, roots: Sequence[int]) -> Holder:
    pid = process.pid
    return Holder(
        pid=pid,
        name=process_name(pid),
        used_bytes=process.used_bytes,
        is_ours=any(pid == root or is_below(pid, root) for root in roots),
    )


def read_gpu_memory(driver: Driver, gpus: Sequence[Gpu]) -> dict[int, int]:
    """Return the memory in use on GPUs by all processes, by their place, as far as it is known."""
    read = partial(read_use, gpus=gpus, with_holders=False)
    uses = (driver.ask(read) if gpus else None) or ()
    found = {use.gpu: use.used_bytes for use in uses}
    return {place: found[gpu] for place, gpu in enumerate(gpus) if gpu in found}


class GpuHealth(Struct, frozen=True, kw_only=True):
    """The health of one GPU; ``None`` or 0 for unsupported values, such as ECC's without ECC."""

    gpu: Gpu
    answers: bool = True
    """Whether the driver can reach it."""
    ecc_errors: int = 0
    """Uncorrected memory errors since its last reset."""
    remap_pending: bool = False
    """Whether faulty memory rows or pages will be replaced at its next reset."""
    remap_failed: bool = False
    """Whether replacing faulty memory rows has failed."""
    throttle_reasons: int = 0
    """Reasons for low clocks at present: bits ``nvmlClocksEventReason*`` of nvml.h."""
    power_limit_w: float | None = None
    power_default_w: float | None = None
    nvlinks: int = 0
    nvlinks_up: int = 0
    use: GpuUse | None = None


def read_health(nvml: Nvml | None, gpus: Sequence[Gpu]) -> list[GpuHealth] | None:
    """Return the health of each GPU, for a MIG instance that of its GPU; ``None`` without NVML."""
    return None if nvml is None else [_read(nvml, gpu) for gpu in gpus]


def _read(nvml: Nvml, gpu: Gpu) -> GpuHealth:
    handle = nvml.whole_gpu(gpu)
    if handle is None:
        return GpuHealth(gpu=gpu, answers=False)
    rows = nvml.numbers("nvmlDeviceGetRemappedRows", handle, 4) or (0, 0, 0, 0)
    pages = nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", handle) or 0
    which = ("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_RESET)
    errors = nvml.number(*which, kind=ctypes.c_ulonglong)
    links = [nvlink_state(nvml, handle, link) for link in range(MOST_NVLINKS)]
    return GpuHealth(
        gpu=gpu,
        ecc_errors=errors or 0,
        remap_pending=bool(rows[2] or pages),
        remap_failed=bool(rows[3]),
        throttle_reasons=_throttle_reasons(nvml, handle),
        power_limit_w=_watts(nvml.number("nvmlDeviceGetPowerManagementLimit", handle)),
        power_default_w=_watts(nvml.number("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        nvlinks=sum(state is not None for state in links),
        nvlinks_up=sum(map(bool, links)),
        use=next(iter(read_use(nvml, [gpu])), None),
    )


def _throttle_reasons(nvml: Nvml, gpu: Handle) -> int:
    for what in ("Event", "Throttle"):  # newer drivers use "Event"
        function = f"nvmlDeviceGetCurrentClocks{what}Reasons"
        if (found := nvml.number(function, gpu, kind=ctypes.c_ulonglong)) is not None:
            return found
    return 0


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


class Xid(Struct, frozen=True):
    """An error of a GPU, as in ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off``."""

    address: str
    """Address of the GPU, without the function: ``0000:3b:00``."""
    number: int
    text: str

    def is_on(self, address: str | None) -> bool:
        """Return whether it is an error of the GPU with this address."""
        return address is not None and address.rpartition(".")[0].lower() == self.address

    @property
    def is_fatal(self) -> bool:
        """Whether nothing can run on the GPU until it is reset or replaced."""
        if self.number == _RECOVERY:
            return _NEEDS_RECOVERY.search(self.text) is not None
        return self.number in _FATAL

    def __str__(self) -> str:
        return f"XID {self.number}" + (f" ({self.text})" if self.text else "")


class XidWatch:
    """The kernel log from now on, if this user may read it."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> list[Xid]:
        """Return the XIDs since the last call."""
        return [] if self._fd is None else list(_find_xids(_read_records(self._fd)))

    def close(self) -> None:
        """Close the log."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_xids(path: Path = KERNEL_LOG) -> list[Xid] | None:
    """Return the XIDs since boot; ``None`` if this user may not read the log.

    Source:
        kernel, Documentation/ABI/testing/dev-kmsg; journalctl(1) for users of its groups.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return list(_find_xids(_read_records(fd)))
        finally:
            os.close(fd)
    except OSError:
        return _read_journal()


def _read_journal() -> list[Xid] | None:
    try:
        found = subprocess.run(_JOURNAL, capture_output=True, timeout=_JOURNAL_TAKES_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found.returncode or not found.stdout:  # it is empty without permission
        return None
    return list(_find_xids(found.stdout.decode(errors="replace").split("\n")))


def _read_records(fd: int) -> Iterator[str]:
    while True:
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the record was overwritten
            continue
        except OSError:
            return
        if not record:
            return
        yield from record.decode(errors="replace").split("\n")


def _find_xids(lines: Iterable[str]) -> Iterator[Xid]:
    for line in lines:
        if found := _XID.match(line):
            text = first_words((found["text"] or "").strip(), _LONGEST)
            yield Xid(found["address"].lower(), int(found["number"]), one_line(text))
