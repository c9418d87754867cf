"""``python -m tests.gpu``: run the tests that need a GPU and write their figures to a file.

It needs no installation, network or xdist, only Python, torch with CUDA, pytest, and what meshrun
imports. Further arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from meshrun.host.nvml import why_no_nvml
from tests.gpu.hardware import count_gpus

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def main() -> int:
    """Run the tests with this folder's settings instead of those of the ordinary tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--figures", type=Path, default=Path("gpu-figures.json"), help="where the figures go"
    )
    arguments, others = parser.parse_known_args()
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in path if each)
    # Plug-ins that happen to be installed do not matter; name one with -p.
    os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # as in each test, to use all GPUs
    # Images set this; an installed meshrun is compiled nevertheless, and a checkout would not be.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["GPU_FIGURES"] = str(arguments.figures.absolute())
    if not count_gpus():
        print(f"no GPU that torch can use: {why_no_nvml()[0]}", file=sys.stderr)
        return 2
    return pytest.main(["-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}", str(HERE), *others])


if __name__ == "__main__":
    sys.exit(main())
