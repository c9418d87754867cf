"""Meshes on GPUs: each dim's group reduces with the requested backend."""

from __future__ import annotations

import pytest

from tests.gpu.hardware import count_gpus, needs
from tests.kit import PROGRAMS, ROOT, run_meshrun

REDUCE = PROGRAMS.parent / "gpu/programs/reduce.py"
RECORDED = REDUCE.with_name("recorded.py")


@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        pytest.param(1, 1, marks=needs()),
        pytest.param(1, 2, marks=needs(gpus=2)),
        pytest.param(2, 2, marks=needs(gpus=4)),
        pytest.param(2, 4, marks=needs(gpus=8)),
    ],
)
def test_each_dim_reduces_over_nccl(dp: int, tp: int) -> None:
    ours = run_meshrun("--mesh", f"dp={dp},tp={tp}", "--device", "cuda", REDUCE)

    assert ours.returncode == 0, ours.stderr
    for dim, size in (("dp", dp), ("tp", tp)):
        assert ours.stdout.count(f"{dim}: {4 * size} by nccl on cuda") == dp * tp, ours.stdout


@needs()
def test_nccls_calls_are_read_from_its_recorder() -> None:
    """torch has a separate recorder for gloo, and only a CUDA build has both."""
    ours = run_meshrun("--mesh", "dp=1,tp=1", "--device", "cuda", RECORDED)

    assert ours.returncode == 0, ours.stderr
    assert "recorded 3" in ours.stdout


@needs()
def test_a_hang_on_a_gpu_is_named() -> None:
    """The rank waits for the GPU while it keeps its core busy."""
    words = ("--mesh", "dp=1,tp=1", "--device", "cuda", "--hang-timeout", "6")
    ours = run_meshrun(*words, RECORDED, "hang")

    assert ours.returncode == 124, ours.stderr
    assert "all_reduce #4" in ours.stderr
    assert "recorded.py:" in ours.stderr


@needs(shared=True)
def test_gloo_ranks_share_one_gpu() -> None:
    """With more ranks than GPUs, the mesh is on the CPU, but its groups also take CUDA tensors."""
    ours = run_meshrun(
        *("--mesh", "dp=2,tp=2", "--device", "cpu", "--backend", "gloo", REDUCE),
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )

    assert ours.returncode == 0, ours.stderr
    for dim in ("dp", "tp"):
        assert ours.stdout.count(f"{dim}: 8 by gloo on cpu") == 4, ours.stdout


@needs()
@pytest.mark.parametrize(
    ("name", "mesh", "gpus"),
    [
        ("fsdp_tp", "dp=1,tp=1", 1),
        ("hsdp", "replicate=1,shard=1", 1),
        ("fsdp_tp", "dp=2,tp=2", 4),
        ("hsdp", "replicate=2,shard=2", 4),
    ],
)
def test_examples_learn(name: str, mesh: str, gpus: int) -> None:
    if count_gpus() < gpus:
        pytest.skip(f"needs {gpus} x CUDA GPU; found {count_gpus()}")
    ours = run_meshrun("--mesh", mesh, "--device", "cuda", ROOT / f"examples/{name}.py")
    losses = [float(line.split()[-1]) for line in ours.stdout.splitlines() if "loss" in line]

    assert ours.returncode == 0, ours.stderr
    assert losses[-1] < losses[0] / 2
