"""Give each Python process the fake NVML of ``tests/nvml.py``."""

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[2] / "nvml.py"
_spec = importlib.util.spec_from_file_location("fake_nvml", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.install()
