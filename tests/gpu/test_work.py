"""What programs can do on their GPU in a process forked after torch's import."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.hardware import count_gpus, needs
from tests.kit import PROGRAMS, run_meshrun

OURS = PROGRAMS.parent / "gpu/programs"


@needs()
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler")
def test_torch_compile(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ours = run_meshrun("--mesh", "dp=1,tp=1", "--device", "cuda", OURS / "compiled.py", env=env)

    if ours.returncode:
        alone = subprocess.run(
            [sys.executable, OURS / "compiled.py"], capture_output=True, text=True, check=False
        )
        if alone.returncode:  # without Python's headers, for example
            pytest.skip(f"fails in plain Python too: {alone.stderr.splitlines()[-1:]}")
    assert ours.returncode == 0, ours.stderr
    assert "compiled True" in ours.stdout


@needs()
@pytest.mark.parametrize(
    ("program", "printed"),
    [("profiled.py", "kernels True"), ("loads.py", "loaded 6048, shared 4")],
)
def test_what_a_fork_might_break_works(program: str, printed: str) -> None:
    """torch's profiler, loader workers, and memory that processes share."""
    ours = run_meshrun(OURS / program)

    assert ours.returncode == 0, ours.stderr
    assert printed in ours.stdout, ours.stderr


@needs()
def test_a_process_that_uses_a_gpu_launches_ranks() -> None:
    words = [sys.executable, OURS / "from_python.py"]
    ours = subprocess.run(words, capture_output=True, text=True, check=False, timeout=90)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == "[8.0, 8.0, 8.0, 8.0] on cuda:0\n"


@needs()
def test_a_mesh_is_checked() -> None:
    gpus = count_gpus()
    ours = run_meshrun("--check", "--mesh", f"dp={gpus}", "--device", "cuda", "quick")

    assert ours.returncode in (0, 1), ours.stderr
    assert f"checked {gpus} rank" in ours.stdout


@needs()
def test_cuda_graph_with_a_collective() -> None:
    ours = run_meshrun("--mesh", "dp=1,tp=1", "--device", "cuda", OURS / "graphs.py")

    assert ours.returncode == 0, ours.stderr
    assert "replayed 4" in ours.stdout
