"""CPU time and memory of processes and GPUs."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from meshrun.host.gpu_state import read_gpu_memory
from meshrun.host.machine import Gpu
from meshrun.host.nvml import Driver
from meshrun.host.process_state import usage_of_trees
from tests.kit import wait_until
from tests.nvml import FakeNvml, card

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "x = bytes(64 << 20).replace(b'\\\\0', b'1')\\n"
    "while True: pass"])
child.wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Give an idle process whose child is busy and holds 64 MiB."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_descendants_count(parent: subprocess.Popen[bytes]) -> None:
    """The child's CPU time and memory are the parent's."""
    wait_until(lambda: usage_of_trees([parent.pid])[parent.pid].cpu_s > 0.5, lambda: "CPU time")

    assert usage_of_trees([parent.pid])[parent.pid].memory_bytes > 64 << 20


def test_a_stopped_process_is_seen(parent: subprocess.Popen[bytes]) -> None:
    """From SIGSTOP to SIGCONT."""
    assert not usage_of_trees([parent.pid])[parent.pid].stopped
    parent.send_signal(signal.SIGSTOP)
    wait_until(lambda: usage_of_trees([parent.pid])[parent.pid].stopped, lambda: "stopped")
    parent.send_signal(signal.SIGCONT)
    wait_until(lambda: not usage_of_trees([parent.pid])[parent.pid].stopped, lambda: "running")


def test_a_process_that_has_ended_uses_nothing() -> None:
    """A rank that ends between two samples is not an error."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()

    assert usage_of_trees([process.pid])[process.pid].cpu_s == 0.0


def test_the_memory_of_gpus_is_as_nvml_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory that the driver reserves; a lost GPU has none."""
    cards = [card("GPU-1", 1, used=5 << 30, reserved=1 << 29), None]
    gpus = [Gpu(entry="0", uuid="GPU-1"), Gpu(entry="1"), Gpu(entry="2", uuid="GPU-3")]
    nvml = FakeNvml(cards)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)

    assert read_gpu_memory(Driver(print), gpus) == {0: 5 << 30}


def test_without_a_driver_there_is_no_memory_of_gpus() -> None:
    assert read_gpu_memory(Driver(print), [Gpu(entry="0", uuid="GPU-1")]) == {}
