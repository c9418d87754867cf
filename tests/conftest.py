"""Fixtures for all tests: a clean environment, and a check that nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from meshrun.rendezvous.attempts import Attempts
from meshrun.rendezvous.connection import Connection
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.participant import Participant
from tests.compiled_driver import compiled_driver  # noqa: F401
from tests.diagrams import check_phases
from tests.engines.gridengine import gridengine  # noqa: F401
from tests.engines.hosts import make_hosts  # noqa: F401 - fixtures
from tests.engines.hydra import mpiexec  # noqa: F401
from tests.engines.openmpi import mpirun  # noqa: F401
from tests.engines.ray_nodes import ray_cluster, ray_nodes  # noqa: F401
from tests.engines.slurm import slurm  # noqa: F401
from tests.engines.sshd import make_sshd  # noqa: F401
from tests.kit import FAKES, MARK, end_marked, has_children, marked_processes, wait_until
from tests.parties import Clock, Parties
from tests.variations import pytest_collection_modifyitems  # noqa: F401 - a hook

# Tests set no upper bound on time: a busy machine is not a bug.
settings.register_profile(
    "meshrun",
    max_examples=int(os.environ.get("MESHRUN_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("meshrun")

# A shell's background jobs ignore some signals, which launches would inherit.
for _signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler)

# With PYTHONDONTWRITEBYTECODE, each launch would compile all of meshrun again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_NOT_OURS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "NO_COLOR", "COLUMNS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_PREFIXES = ("MESHRUN_", "TORCHELASTIC_", "PET_", "SLURM_", "OMPI_", "KUBERNETES_", "GLOO_",
             "SKYPILOT_", "LWS_", "JOB_COMPLETION_", "JOBSET_")  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers and schedulers from the environment."""
    for name in list(os.environ):
        if name in _NOT_OURS or name.startswith(_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_left(
    clean_environment: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Fail a test that leaves a process behind, or a file of meshrun's in the temporary folder."""
    awaited = resource.getrusage(resource.RUSAGE_CHILDREN)
    mark = uuid.uuid4().hex
    # A short unique name, as paths of sockets are limited.
    folder = Path(tempfile.mkdtemp(prefix="", dir=tmp_path_factory.getbasetemp()))
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    try:
        # Most tests start none, and to look at all processes takes longer than they do.
        if has_children() or resource.getrusage(resource.RUSAGE_CHILDREN) != awaited:
            wait_until(
                lambda: not marked_processes(mark), lambda: "\n".join(marked_processes(mark))
            )
        left = sorted(path.name for path in folder.glob("meshrun*"))
        assert left == []
    except BaseException:
        end_marked(mark)
        raise


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the environment by an empty one, and return it."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    return environment


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a fake torch first on the path; return the file in which it counts its imports."""
    counted = tmp_path / "imports"
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("FAKE_TORCH_IMPORTS", str(counted))
    return counted


@pytest.fixture
def fake_nvml(
    fake_torch: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[dict[str, Any]]], None]:
    """Give launches a fake NVML; return a function that sets its GPUs, even during a launch."""
    path = tmp_path / "cards.json"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(FAKES / "nvml")]))
    monkeypatch.setenv("FAKE_NVML", str(path))

    def write(cards: list[dict[str, Any]]) -> None:
        (tmp_path / "cards.new").write_text(json.dumps(cards))
        (tmp_path / "cards.new").replace(path)

    return write


@pytest.fixture
def parties(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parties]:
    """Launchers' ends of the channel between nodes; see ``tests.parties``."""
    check_phases(monkeypatch, Attempts, Connection, Coordinator, Participant)
    made = Parties(Clock())
    try:
        yield made
    finally:
        made.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run one test more than there are cores, as most tests wait for processes."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture
def as_nobody() -> Iterator[tuple[list[str], Path]]:
    """Return a command prefix that runs as a user without processes, and that user's folder."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become a user who has no processes")
    uid = random.SystemRandom().randrange(100_000, 2_000_000_000)
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    # This Python may be in a folder that only root can read.
    words += [f"--{kind}-caps=+dac_override,+dac_read_search" for kind in ("inh", "ambient")]
    folder = Path(tempfile.mkdtemp(prefix="of_nobody_", dir="/tmp"))
    os.chown(folder, uid, uid)
    try:
        if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("setpriv is not permitted to change the user")
        yield words, folder
    finally:
        shutil.rmtree(folder)
