"""A job script on the first host starts launchers on the others with the scheduler's own command.

A stand-in with the same arguments replaces the command and enters a host as the real one would.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.engines.gridengine import GridEngine
from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.openmpi import write_agent
from tests.kit import PROGRAMS, command, wait_until

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--nnodes", "2", "--mesh", "dp=2,tp=2", "--device", "cpu", "--no-prefix")


def job(hosts: Hosts, folder: Path, name: str, shifts: int) -> dict[str, str]:
    """Install the stand-in in PATH; return the variables of a Grid Engine or LSF job."""
    (folder / "bin").mkdir()
    starter = folder / "bin" / name
    agent = write_agent(hosts, folder)
    starter.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/words\n{"shift;" * shifts} exec {agent} "$@"\n'
    )
    starter.chmod(0o755)
    (folder / "pe").write_text("".join(f"{host} 2 all.q@{host} <NULL>\n" for host in hosts.names))
    path = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
    if name == "qrsh":
        return {"PATH": path, "JOB_ID": "7", "PE_HOSTFILE": f"{folder}/pe", "NHOSTS": "2"}
    slots = " ".join(f"{host} 2" for host in hosts.names)
    return {"PATH": path, "LSB_JOBID": "7", "LSB_MCPU_HOSTS": slots}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "shifts"), [("qrsh", 1), ("blaunch", 0)])
def test_nnodes_is_enough(make_hosts: MakeHosts, tmp_path: Path, name: str, shifts: int) -> None:
    """The job's hosts are used; the first is local and needs no command."""
    hosts = make_hosts(2)
    env = job(hosts, tmp_path, name, shifts)
    done = hosts.run(0, command(*MESH, SAYS), env=env)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 3 of 4 on node1: dp 1 tp 1, sum 6" in done.stdout.splitlines()
    assert f"starting a launcher on each of 2 hosts with {name}" in done.stderr
    words = (tmp_path / "words").read_text().split()
    assert words[: shifts + 1] == [*["-inherit"] * shifts, "node1"]


@pytest.mark.nightly
def test_a_failure_ends_all(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """With the rank's exit code; no process is left on any host."""
    hosts = make_hosts(2)
    env = job(hosts, tmp_path, "qrsh", 1)
    done = hosts.run(0, command(*MESH, TOGETHER, "exit=3:3", "stay"), env=env)

    assert done.returncode == 3, done.stdout + done.stderr
    wait_until(lambda: not any(hosts.processes(host) for host in range(2)), done.stderr.strip)


@pytest.mark.nightly
def test_another_host_of_the_job_starts_nothing(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """As when the same command runs on every host."""
    hosts = make_hosts(2)
    done = hosts.run(1, command(*MESH, SAYS), env=job(hosts, tmp_path, "qrsh", 1))

    assert done.returncode == 2
    assert "--nnodes 2 on host 1 of Grid Engine's 2, counting from 0" in done.stderr
    assert not (tmp_path / "words").exists()


@pytest.mark.nightly
def test_a_real_grid_engine(gridengine: GridEngine) -> None:
    """Its qrsh runs a launch, and passes on a failure and its exit code."""
    launch = shlex.join(command(*MESH, SAYS))
    failing = shlex.join(command(*MESH, TOGETHER, "exit=3:5", "stay"))
    printed = gridengine.run_job(f"{launch}; echo code $?\n{failing}; echo code $?", nodes=2)

    assert "starting a launcher on each of 2 hosts with qrsh" in printed
    assert sum(" of 4 on node" in line for line in printed.splitlines()) == 4, printed
    assert [line for line in printed.splitlines() if line.startswith("code ")] == [
        "code 0",
        "code 5",
    ]
    assert "rank 3 [dp1 tp1] exited with code 5" in printed


@pytest.mark.nightly
@pytest.mark.parametrize("options", [(), ("-notify",)])
def test_qdel_leaves_nothing(gridengine: GridEngine, options: tuple[str, ...]) -> None:
    """It kills the job on its first host and everything started on the others."""
    launch = shlex.join(command(*MESH, TOGETHER, "save", "stay"))
    gridengine.start_job(launch, *options, nodes=2)
    output = gridengine.output
    wait_until(
        lambda: output.exists() and output.read_text().count("met 4") == 4,
        lambda: output.read_text() if output.exists() else "no output",
    )
    gridengine.qdel()

    hosts = gridengine.hosts
    wait_until(lambda: not hosts.launches(), lambda: str(hosts.launches()))
