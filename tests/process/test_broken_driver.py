"""NVIDIA's driver never answers, answers late, or its library crashes."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit import FAKES, run_meshrun, start_meshrun, wait_until
from tests.nvml import card

Write = Callable[[list[Any]], None]
NO_ANSWER = "the NVIDIA driver has not answered for "


@pytest.fixture
def hang(fake_nvml: Write, tmp_path: Path) -> Path:
    """Give two GPUs; return the file as long as which the driver does not start to answer."""
    fake_nvml([card("GPU-0", 1, used=1 << 30), card("GPU-1", 2, used=1 << 30)])
    return tmp_path / "nvmlInit_v2 hangs"


@pytest.mark.nightly
def test_a_driver_that_never_answers_is_named(hang: Path, tmp_path: Path) -> None:
    """Before ranks start, and Ctrl-C ends the wait; a mesh on the CPU does not ask it."""
    hang.touch()
    with start_meshrun("--nproc-per-node", "1", "--no-python", "true", folder=tmp_path) as run:
        wait_until(lambda: f"meshrun: {NO_ANSWER}5 s" in run.stderr, lambda: run.stderr)
        run.signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT

    on_cpu = run_meshrun("--mesh", "2", "--device", "cpu", "--no-python", "true")
    assert (on_cpu.returncode, on_cpu.stderr) == (0, "")


@pytest.mark.nightly
def test_a_launch_starts_once_the_driver_answers(hang: Path, tmp_path: Path) -> None:
    hang.touch()
    with start_meshrun("--nproc-per-node", "1", "--no-python", "true", folder=tmp_path) as run:
        wait_until(lambda: NO_ANSWER in run.stderr, lambda: run.stderr)
        hang.unlink()
        assert run.wait() == 0, run.stderr
    assert "the NVIDIA driver answered after " in run.stderr


def test_a_launch_goes_on_while_the_driver_hangs(hang: Path, tmp_path: Path) -> None:
    """The status lacks the GPUs' memory until it answers; Ctrl-C ends the launch as usual."""
    words = ("--nproc-per-node", "1", "--status", "--status-interval", "200ms")
    with start_meshrun(*words, "--no-python", "sleep", "1000", folder=tmp_path) as run:
        wait_until(lambda: "GPU memory 1.0G" in run.stderr, lambda: run.stderr)
        hang.touch()
        wait_until(lambda: NO_ANSWER in run.stderr, lambda: run.stderr)
        before = len(run.stderr)
        wait_until(lambda: "1 running, " in run.stderr[before:], lambda: run.stderr)
        assert "GPU memory" not in run.stderr[before:]
        hang.unlink()
        wait_until(lambda: "GPU memory" in run.stderr[before:], lambda: run.stderr)
        assert "the NVIDIA driver answered after " in run.stderr[before:]
        hang.touch()
        run.signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT


@pytest.mark.nightly
def test_a_restart_does_not_wait_for_a_driver_that_hangs(hang: Path, tmp_path: Path) -> None:
    """It waits as long as the option says, and tells why."""
    words = ("--nproc-per-node", "1", "--max-restarts", "1", "--gpu-memory-wait", "512MiB,3s")
    until = f"echo runs; until [ -e '{hang}' ]; do sleep 0.1; done"
    command = (
        "--no-prefix",
        "--no-python",
        "sh",
        "-c",
        f"{until}; exit $((!TORCHELASTIC_RESTART_COUNT))",
    )
    with start_meshrun(*words, *command, folder=tmp_path) as run:
        wait_until(lambda: "runs" in run.stdout, lambda: run.stderr)
        hang.touch()
        assert run.wait() == 0, run.stderr
    assert run.stdout == "runs\nruns\n"
    assert f"meshrun: restarting after 3 s although {NO_ANSWER}" in run.stderr


@pytest.mark.nightly
def test_nodes_meet_without_asking_the_driver_again(hang: Path, tmp_path: Path) -> None:
    """A node that waits for its driver cannot answer the others."""
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--no-prefix", "--no-python", "echo", "runs")
    with start_meshrun("--node-rank", "0", "--master-port", "0", *words, folder=tmp_path) as run:
        wait_until(lambda: "--rdzv-endpoint" in run.stderr, lambda: run.stderr)
        hang.touch()
        port = run.stderr.partition("--rdzv-endpoint ")[2].split()[0]
        without = {"PYTHONPATH": str(FAKES)}
        other = run_meshrun("--rdzv-endpoint", port, *words, env=without)
        assert (other.returncode, run.wait()) == (0, 0), run.stderr
    assert NO_ANSWER not in run.stderr


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetUUID"])
def test_a_crash_of_the_library_is_reported(function: str, hang: Path) -> None:
    """As the error that prevents the launch."""
    (hang.parent / f"{function} crashes").touch()

    ours = run_meshrun("--nproc-per-node", "1", "--no-python", "true")

    assert ours.returncode == 71
    assert ours.stderr.startswith("error: the NVIDIA driver's library crashed with signal 6\n")
