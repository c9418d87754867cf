"""Stand-ins for NVIDIA's driver and NVML, compiled here, as a machine with one device has them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import FAKES

_LIBRARIES = {"libcuda.so.1": "cuda.c", "libnvidia-ml.so.1": "nvml.c"}


@dataclass(frozen=True)
class Driver:
    """The libraries' folder, and the file in which each call of ``cuInit`` is a line."""

    folder: Path
    calls: Path

    @property
    def env(self) -> dict[str, str]:
        """Variables with which a program finds the libraries, and nothing of the machine's."""
        return {"LD_LIBRARY_PATH": str(self.folder), "STUB_CALLS": str(self.calls)}

    def initialized_by(self) -> list[int]:
        """Return the processes that called ``cuInit``."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [int(line.split()[0]) for line in lines]


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """Compile the libraries; skip the test where nothing can."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler, which makes the stand-in for the driver")
    folder = tmp_path / "driver"
    folder.mkdir()
    for name, source in _LIBRARIES.items():
        library = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name)
        subprocess.run(
            [compiler, "-w", *library, FAKES / "nvidia" / source, "-ldl"], check=True, timeout=60
        )
    return Driver(folder, tmp_path / "calls")
