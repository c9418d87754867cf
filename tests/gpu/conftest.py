"""The environment of a GPU test, and the file of figures, with ``tests/conftest.py`` or alone."""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.hardware import count_gpus, nvml
from tests.kit import MARK, end_marked, marked_processes, wait_until

_FIGURES: dict[str, Any] = {}
_OUTCOMES: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves a process."""
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
    """What is measured; all of it is in one file at the end."""
    return _FIGURES


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each test ended, and why it was skipped."""
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        name = report.nodeid.rpartition("/")[2]
        _OUTCOMES[name] = {"outcome": report.outcome, "seconds": round(report.duration, 2)} | (
            {"why": why} if why else {}
        )


def pytest_sessionfinish() -> None:
    """Write the file that ``python -m tests.gpu`` names."""
    path = os.environ.get("MESHRUN_GPU_FIGURES")
    if path:
        found = {"ran_on": _ran_on(), "figures": _FIGURES, "tests": _OUTCOMES}
        Path(path).write_text(json.dumps(found, indent=2) + "\n")


def _ran_on() -> dict[str, Any]:
    import importlib.metadata as packages

    import torch

    gpus, driver = [], None
    if (library := nvml()) is not None:
        driver = library.text("nvmlSystemGetDriverVersion")
        gpus = [library.text("nvmlDeviceGetName", gpu) for gpu in library.gpus() if gpu]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpus": gpus or count_gpus(),
        "driver": driver,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "pytest": packages.version("pytest"),
    }
