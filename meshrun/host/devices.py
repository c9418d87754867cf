"""The accelerator that torch was built for, without importing torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from meshrun.host.visibility import Build

_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=]*=\s*'", re.MULTILINE)
_BUILDS: tuple[Build, ...] = ("hip", "cuda", "xpu")


def build_of_torch() -> Build | None:
    """Return the platform that the installed torch was built for, or ``None``.

    Source:
        ``torch/version.py``, written by torch's build: ``cuda: Optional[str] = '12.8'``.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    built_for = {match.group(1) for match in _BUILD.finditer(text)}
    return next((build for build in _BUILDS if build in built_for), None)


def accelerator_of(build: Build | None) -> str | None:
    """Return the torch device type of a build; ROCm's is ``cuda``."""
    return "cuda" if build == "hip" else build


def accelerator_of_torch() -> str | None:
    """Return the torch device type that the installed torch was built for, or ``None``."""
    return accelerator_of(build_of_torch())
