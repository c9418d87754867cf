"""Libraries treat a rank of meshrun like one of torchrun, and train."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.kit import run_meshrun

pytestmark = [pytest.mark.integrations, pytest.mark.torch, pytest.mark.slow]
_PROGRAMS = Path(__file__).parent / "programs"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_LAUNCHES = {
    "plain": ("--nproc-per-node", "2"),
    "mesh": ("--mesh", "dp=2", "--device", "cpu"),
    "fresh": ("--nproc-per-node", "2", "--start-method", "exec"),
}


@pytest.fixture(
    params=[
        "mesh",
        pytest.param("plain", marks=pytest.mark.nightly),
        pytest.param("fresh", marks=pytest.mark.nightly),
    ]
)
def launch(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Options that start two ranks, with or without a mesh."""
    return _LAUNCHES[request.param]


def trained(launch: tuple[str, ...], name: str, *args: str | Path) -> list[dict[str, object]]:
    """Run a program, check what every library must do, and return its ranks' reports."""
    ours = run_meshrun(*launch, "--no-prefix", _PROGRAMS / name, *args, env=_OFFLINE)
    assert ours.returncode == 0, ours.stderr
    reports = [json.loads(line) for line in ours.stdout.splitlines() if line.startswith('{"rank"')]
    reports.sort(key=lambda entry: entry["rank"])

    assert [entry["rank"] for entry in reports] == [0, 1], ours.stdout
    assert [entry["library"] for entry in reports] == [[0, 0, 2], [1, 1, 2]]
    for entry in reports:
        assert (entry["world"], entry["backend"]) == (2, "gloo")
        assert entry["elastic"], "the library did not detect torchrun"
        assert entry["trained"]
        assert entry["weights"] == reports[0]["weights"], "gradients were not averaged"
    return reports


def needs(module: str) -> None:
    """Skip the test if a library is missing, without importing it."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install 'meshrun[integrations]'")


@pytest.mark.nightly  # the Trainer is from the same library
def test_lightning_fabric_trains(launch: tuple[str, ...]) -> None:
    """Fabric detects TorchElasticEnvironment, starts no processes, and runs DDP."""
    needs("lightning")
    trained(launch, "fabric.py")


@pytest.mark.nightly  # the slowest of these
def test_the_lightning_trainer_trains(launch: tuple[str, ...], tmp_path: Path) -> None:
    """Two steps with DDP, and a checkpoint from one rank."""
    needs("lightning")
    reports = trained(launch, "trainer.py", tmp_path)

    assert [entry["steps"] for entry in reports] == [2, 2]
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_accelerate_trains(launch: tuple[str, ...]) -> None:
    """Accelerator(cpu=True) sees both processes and gathers from them."""
    needs("accelerate")
    trained(launch, "accelerated.py")


@pytest.mark.nightly
def test_the_transformers_trainer_trains(launch: tuple[str, ...], tmp_path: Path) -> None:
    """Two steps with a tiny model."""
    needs("accelerate")
    needs("transformers")
    reports = trained(launch, "bert.py", tmp_path)

    assert [entry["steps"] for entry in reports] == [2, 2]


@pytest.mark.parametrize(
    "words",
    [pytest.param((), marks=pytest.mark.nightly, id="env"),
     pytest.param(("--local_rank=${local_rank}",), id="argument")],
)  # fmt: skip
def test_a_script_in_deepspeeds_style_trains(
    launch: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """It uses LOCAL_RANK or --local_rank, its own process group, and DDP."""
    trained(launch, "deepspeed_style.py", "--lr", "0.1", *words)
