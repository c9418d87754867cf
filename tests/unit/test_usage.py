"""What processes and GPUs use, as it is counted."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from meshrun.host import topology
from meshrun.host.usage import GpuMemory, usage_of_trees
from tests.kit import wait_until

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "x = bytes(64 << 20).replace(b'\\\\0', b'1')\\n"
    "while True: pass"])
child.wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, with a child that works and holds 64 MiB."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_descendants_count(parent: subprocess.Popen[bytes]) -> None:
    """The child's CPU time and memory are the parent's."""
    wait_until(lambda: usage_of_trees([parent.pid])[parent.pid].cpu_s > 0.5, lambda: "CPU time")

    assert usage_of_trees([parent.pid])[parent.pid].memory_bytes > 64 << 20


def test_a_stopped_process_is_seen(parent: subprocess.Popen[bytes]) -> None:
    """SIGSTOP shows, and SIGCONT takes it back."""
    assert not usage_of_trees([parent.pid])[parent.pid].stopped
    parent.send_signal(signal.SIGSTOP)
    wait_until(lambda: usage_of_trees([parent.pid])[parent.pid].stopped, lambda: "stopped")
    parent.send_signal(signal.SIGCONT)
    wait_until(lambda: not usage_of_trees([parent.pid])[parent.pid].stopped, lambda: "going on")


def test_a_process_that_is_gone_uses_nothing() -> None:
    """A rank that ended between two looks is no error."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()

    assert usage_of_trees([process.pid])[process.pid].cpu_s == 0.0


class FakeNvml:
    """The part of pynvml that is used: one GPU by its address, another that is lost."""

    class NVMLError(Exception):
        """A GPU cannot be asked."""

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> bytes:  # noqa: N802
        return address

    def nvmlDeviceGetMemoryInfo(self, handle: bytes) -> SimpleNamespace:  # noqa: N802
        if handle == b"0000:02:00.0":
            raise self.NVMLError
        return SimpleNamespace(used=5 << 30)


def test_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVML says of a GPU; nothing of one that is lost, or is not there."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    found = ["0000:01:00.0", "0000:02:00.0"]
    monkeypatch.setattr(topology, "visible_pci_addresses", lambda _: found)
    gpus = GpuMemory({})

    assert [gpus.used_bytes(index) for index in range(3)] == [5 << 30, None, None]


def test_without_the_module_there_is_no_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py is never needed."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert GpuMemory({}).used_bytes(0) is None
