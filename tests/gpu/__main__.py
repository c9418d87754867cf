"""``python -m tests.gpu``: run the tests that need a GPU, and write their figures to a file.

It needs no installation, no network and no xdist: Python, torch with CUDA, pytest, and what meshrun
imports. Further arguments are pytest's.
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
    """Run them with the settings of this folder, and not those of the ordinary tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--figures", type=Path, default=Path("gpu-figures.json"), help="where the figures go"
    )
    arguments, others = parser.parse_known_args()
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in path if each)
    # What else is installed there is nobody's concern; name a plugin with -p.
    os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # as for each test; all GPUs are used
    os.environ["GPU_FIGURES"] = str(arguments.figures.absolute())
    if not count_gpus():
        print(f"no GPU that torch could use: {why_no_nvml()[0]}", file=sys.stderr)
        return 2
    return pytest.main(["-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}", str(HERE), *others])


if __name__ == "__main__":
    sys.exit(main())
