"""Launches without what only Linux has, as on macOS, where none of these tests has run."""

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit import FAKES, PROGRAMS, run_meshrun, start_meshrun


@pytest.fixture(autouse=True)
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide it from meshrun's own code."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES / "macos"))


@pytest.fixture
def macos_with_fake_torch(fake_torch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(FAKES / "macos")]))


def test_a_failure_is_reported(macos_with_fake_torch: object) -> None:
    """Of ranks in new interpreters: forks of macOS lose the threads of its libraries."""
    plan = run_meshrun("--dry-run", "train.py")
    ours = run_meshrun("--nproc-per-node", "2", PROGRAMS / "end.py", "raise")

    assert "\nstart: exec (macOS libraries" in plan.stdout
    assert ours.returncode == 1
    assert "error: rank 1 raised ValueError: the loss is nan, exit code 1\n" in ours.stderr


@pytest.mark.parametrize(
    ("victim", "signum"),
    [("launcher", signal.SIGKILL), ("launcher", signal.SIGTERM), ("zygote", signal.SIGKILL)],
)
def test_nothing_is_left_behind(
    victim: str, signum: int, macos_with_fake_torch: object, tmp_path: Path
) -> None:
    """Not even processes in sessions of their own, which no process adopts."""
    words = ("--nproc-per-node", "2", PROGRAMS / "wait.py", "children")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 2)
        os.kill(running.zygote() if victim == "zygote" else running.process.pid, signum)
        assert running.wait() == 128 + signum


@pytest.mark.nightly
@pytest.mark.torch
def test_two_nodes_build_a_mesh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over gloo, which is told the name that the loopback interface has here."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    words = ("--nnodes", "2", "--mesh", "dp=1,tp=2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    folders = [tmp_path / name for name in "01"]
    with ExitStack() as stack:
        running = []
        for number, folder in enumerate(folders):
            folder.mkdir()
            node = ("--node-rank", str(number), PROGRAMS / "ask_mesh.py")
            running.append(stack.enter_context(start_meshrun(*words, *node, folder=folder)))
        codes = [each.wait() for each in running]

    assert codes == [0, 0], [each.stderr for each in running]
