"""MPICH's mpiexec gives processes no hosts or addresses, so they exchange them through it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.hydra import Mpiexec, mpiexec_words
from tests.kit import PROGRAMS, command, wait_until

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--mesh", "dp=2,tp=2", "--device", "cpu")
TASK = [sys.executable, str(PROGRAMS / "task.py")]


@pytest.mark.nightly
def test_mpiexec_is_enough(make_hosts: MakeHosts, mpiexec: Mpiexec) -> None:
    """One launcher per host, whose own name resolves to loopback; both share a secret."""
    hosts = make_hosts(2, own_name="loopback")
    done = mpiexec(hosts, *command(*MESH, SAYS))

    assert done.returncode == 0, done.stdout + done.stderr
    last = "[dp1 tp1] rank 3 of 4 on node1: dp 1 tp 1, sum 6"
    assert sorted(done.stdout.splitlines())[-1] == last
    assert "MPICH, process 0 of 2 (PMI_RANK, MPI_LOCALRANKID): node 0 of 2 nodes" in done.stderr
    assert "no secret" not in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("number", [4, 3])
def test_a_process_per_rank_is_reported_once(
    make_hosts: MakeHosts, mpiexec: Mpiexec, number: int
) -> None:
    """With the number of processes on each node, even or not, and the command to use."""
    done = mpiexec(make_hosts(2), *command(*MESH, SAYS), slots=2, number=number)

    assert done.returncode != 0
    counts = "4 times on 2 nodes" if number == 4 else "3 times on 2 nodes (2, 1)"
    assert done.stderr.count(f"MPICH started meshrun {counts}") == 1, done.stderr
    assert "hint: mpiexec -ppn 1 meshrun ..." in done.stderr


@pytest.mark.nightly
def test_mpiexec_is_enough_for_a_mesh(make_hosts: MakeHosts, mpiexec: Mpiexec) -> None:
    """Each process, a plain python, joins the others."""
    env = {"MESHRUN_MESH": "dp=2,tp=2", "MESHRUN_DEVICE": "cpu"}
    done = mpiexec(make_hosts(2), *TASK, slots=2, env=env, timeout=110)

    assert sorted(done.stdout.splitlines()) == [
        f"{rank} ({rank // 2}, {rank % 2}) {1 if rank < 2 else 5} 10.77.0.1 eth0"
        for rank in range(4)
    ], done.stderr


@pytest.mark.nightly
def test_a_failure_on_one_host_ends_all(make_hosts: MakeHosts, mpiexec: Mpiexec) -> None:
    """With the rank's exit code; no process is left."""
    hosts = make_hosts(2)
    done = mpiexec(hosts, *command(*MESH, TOGETHER, "exit=3:3", "stay"))

    assert done.returncode == 3, done.stdout + done.stderr
    wait_until(lambda: not any(hosts.processes(host) for host in range(2)), done.stderr.strip)


@pytest.mark.nightly
def test_ctrl_c_ends_all(make_hosts: MakeHosts, mpiexec: Mpiexec, tmp_path: Path) -> None:
    """No process is left on any host."""
    hosts = make_hosts(2)
    output = tmp_path / "output"
    words = [*mpiexec_words(hosts, tmp_path), *command(*MESH, TOGETHER, "stay")]
    with open(output, "wb") as file:
        job = hosts.popen(0, words, stdout=file, stderr=file)
    wait_until(lambda: output.read_text().count("met 4") == 4, output.read_text)
    job.send_signal(signal.SIGINT)

    job.wait(timeout=60)  # mpiexec's exit code means nothing
    wait_until(lambda: not any(hosts.processes(host) for host in range(2)), output.read_text)


@pytest.mark.nightly
def test_each_process_becomes_its_rank(make_hosts: MakeHosts, mpiexec: Mpiexec) -> None:
    """The processes exchange addresses once, before the program starts."""
    done = mpiexec(make_hosts(2), *command("--per-task", *MESH, SAYS), slots=2, timeout=110)

    assert done.returncode == 0, done.stderr
    assert "rank 3 of 4 on node1: dp 1 tp 1, sum 6" in done.stdout  # mpiexec may join lines
