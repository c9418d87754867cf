"""The environment of GPU tests and their file of figures, with or without ``tests/conftest.py``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.hardware import count_gpus, nvml
from tests.kit import MARK, end_marked, marked_processes, wait_until

_LAST_START_S = 390.0
"""When the last test starts, so that all end within 8 minutes even if that one hangs."""
_BEGAN = time.monotonic()
_ORDER = ("test_mesh", "test_work", "test_failures", "test_devices", "test_figures")

_FIGURES: dict[str, Any] = {}
_OUTCOMES: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a process behind."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield
    try:
        wait_until(lambda: not marked_processes(mark), lambda: "\n".join(marked_processes(mark)))
    finally:
        end_marked(mark)


@pytest.fixture
def figures() -> dict[str, Any]:
    """Measured figures, all written to one file."""
    return _FIGURES


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record each test's outcome and reason, and write it at once as the run may be killed."""
    if report.when == "call" or report.outcome != "passed":
        is_skip = isinstance(report.longrepr, tuple)
        why = report.longrepr[2] if is_skip else report.longreprtext[-6000:]
        name = report.nodeid.rpartition("/")[2]
        _OUTCOMES[name] = {"outcome": report.outcome, "seconds": round(report.duration, 2)} | (
            {"why": why} if why else {}
        )
    if report.when == "teardown":
        _write()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the most important tests first, in case time is short."""
    places = {name: place for place, name in enumerate(_ORDER)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_sessionstart() -> None:
    """Import torch once, as the first import from disk may take longer than a test waits."""
    _ran_on()


def pytest_runtest_setup() -> None:
    """Skip tests that may not finish in time."""
    if time.monotonic() > _BEGAN + _LAST_START_S:
        pytest.skip(f"out of time: tests start in the first {_LAST_START_S:g} s")


def _write() -> None:
    """Write the file that ``python -m tests.gpu`` names."""
    if path := os.environ.get("GPU_FIGURES"):
        found = {"ran_on": _ran_on(), "figures": _FIGURES, "tests": _OUTCOMES}
        new = Path(f"{path}.new")
        new.write_text(json.dumps(found, indent=2) + "\n")
        new.replace(path)


@lru_cache
def _ran_on() -> dict[str, Any]:
    import importlib.metadata as packages

    # Not in this process, which should hold no memory; the first import reads gigabytes.
    code = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    try:
        torch, cuda = json.loads(asked.stdout)
    except ValueError:
        torch, cuda = asked.stderr[-500:], None
    gpus, driver, modes = [], None, []
    if (library := nvml()) is not None:
        driver = library.text("nvmlSystemGetDriverVersion")
        gpus = [library.text("nvmlDeviceGetName", gpu) for gpu in library.gpus().values() if gpu]
        asks = partial(library.number, "nvmlDeviceGetPersistenceMode")
        modes = [asks(gpu) for gpu in library.gpus().values() if gpu]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpus": gpus or count_gpus(),
        "driver": driver,
        "persistence mode": modes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch,
        "cuda": cuda,
        "pytest": packages.version("pytest"),
    }
