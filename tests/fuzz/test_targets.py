"""The fuzz targets accept their seeds; nightly, atheris searches for inputs that break them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import SEEDS, TARGETS
from tests.kit import ROOT

SECONDS = int(os.environ.get("MESHRUN_FUZZ_SECONDS", "60"))


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, seeds in SEEDS.items() for seed in seeds]
)
def test_a_target_accepts_its_seeds(name: str, seed: bytes) -> None:
    """And every prefix of each."""
    for length in range(len(seed) + 1):
        TARGETS[name](seed[:length])


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed: pip install -e '.[fuzz]'",
)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_atheris_finds_nothing(name: str, tmp_path: Path) -> None:
    """Neither an unexpected exception nor a hang."""
    words = [sys.executable, "-m", "tests.fuzz", name, str(SECONDS)]
    fuzzer = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )

    assert fuzzer.returncode == 0, fuzzer.stderr[-6000:]
    assert "Done " in fuzzer.stderr
    assert list(tmp_path.iterdir()) == []
