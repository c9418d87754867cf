"""Stand-ins for NVIDIA's driver and NVML on a machine with one device, compiled from C."""

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
class CompiledDriver:
    """The libraries' folder, and the file with a line for each call of ``cuInit``."""

    folder: Path
    calls: Path

    @property
    def env(self) -> dict[str, str]:
        """Variables that make a program load these libraries instead of the machine's."""
        return {"LD_LIBRARY_PATH": str(self.folder), "STUB_CALLS": str(self.calls)}

    def initialized_by(self) -> list[int]:
        """Return the processes that called ``cuInit``."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [int(line.split()[0]) for line in lines]


@pytest.fixture
def compiled_driver(tmp_path: Path) -> CompiledDriver:
    """Compile the libraries; skip the test if there is no compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("needs a C compiler, for the stand-in for the driver")
    folder = tmp_path / "driver"
    folder.mkdir()
    for name, source in _LIBRARIES.items():
        library = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name)
        subprocess.run(
            [compiler, "-w", *library, FAKES / "compiled_driver" / source, "-ldl"],
            check=True,
            timeout=60,
        )
    return CompiledDriver(folder, tmp_path / "calls")
