"""A plain python in a Slurm or Open MPI task gets the mesh, without any launcher."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.openmpi import Mpirun
from tests.engines.slurm import Slurm
from tests.kit import PROGRAMS

pytestmark = pytest.mark.torch
TASK = [sys.executable, str(PROGRAMS / "task.py")]
LAYOUT = [*TASK, "layout"]
MESH = {"MESHRUN_MESH": "dp=2,tp=2", "MESHRUN_DEVICE": "cpu"}
EXPORT = ["-x", "MESHRUN_MESH", "-x", "MESHRUN_DEVICE"]
UNBOUND = ["--bind-to", "none"]
HEAD = "10.77.0.1"
MESH_LINES = [
    f"{rank} ({rank // 2}, {rank % 2}) {1 if rank < 2 else 5} {HEAD} eth0" for rank in range(4)
]


@pytest.mark.nightly
def test_srun_is_enough_for_a_mesh(slurm: Slurm) -> None:
    """On two hosts whose own names resolve to loopback."""
    options = ["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit"]
    ours = slurm.srun(*options, *TASK, env=MESH, timeout=110)

    assert sorted(ours.stdout.splitlines()) == MESH_LINES, ours.stderr


@pytest.mark.nightly
def test_a_batch_script_starts_a_mesh_by_srun(slurm: Slurm) -> None:
    """The coordinator is not the cluster's first node."""
    script = f"srun --kill-on-bad-exit {' '.join(TASK)}"
    env = {"MESHRUN_MESH": "pp=2,dp=1", "MESHRUN_DEVICE": "cpu"}
    printed = slurm.sbatch(
        script, "--nodelist=sl[1-2]", "--ntasks-per-node=1", "--nodes=2", env=env
    )

    assert sorted(printed.splitlines()) == [
        "0 (0, 0) 0 10.77.0.2 eth0",
        "1 (1, 0) 1 10.77.0.2 eth0",
    ], printed


@pytest.mark.nightly
@pytest.mark.parametrize("own_name", ["loopback", "nothing"])
def test_mpirun_is_enough_for_a_mesh(make_hosts: MakeHosts, mpirun: Mpirun, own_name: str) -> None:
    """On two hosts whose own names resolve to loopback or to nothing."""
    hosts = make_hosts(2, own_name=own_name)
    ours = mpirun(hosts, *UNBOUND, *EXPORT, *TASK, env=MESH, timeout=110)

    assert sorted(ours.stdout.splitlines()) == MESH_LINES, ours.stderr


@pytest.mark.nightly
def test_mpirun_from_a_host_without_ranks(make_hosts: MakeHosts, mpirun: Mpirun) -> None:
    """mpirun gives ranks only that host's address, which is an error; MASTER_ADDR solves it."""
    hosts = make_hosts(3)
    env = {"MESHRUN_MESH": "dp=2,tp=1", "MESHRUN_DEVICE": "cpu"}
    ours = mpirun(hosts, *UNBOUND, *EXPORT, *TASK, env=env, slots=1, on=[1, 2])
    place = ["-x", f"MASTER_ADDR={hosts.addresses[1]}", "-x", "MASTER_PORT=29511"]
    helped = mpirun(hosts, *UNBOUND, *EXPORT, *place, *TASK, env=env, slots=1, on=[1, 2])

    assert ours.returncode == 1
    assert "rank 0 runs on node1, but mpirun names only its own host: `10.77.0.1`" in ours.stderr
    assert sorted(helped.stdout.splitlines()) == [
        "0 (0, 0) 0 10.77.0.2 eth0",
        "1 (1, 0) 1 10.77.0.2 eth0",
    ], helped.stderr


@pytest.mark.nightly
def test_mpirun_gives_a_layout(make_hosts: MakeHosts, mpirun: Mpirun) -> None:
    """With ranks in blocks by node; other orders and uneven nodes are errors."""
    hosts = make_hosts(2)
    even = mpirun(hosts, *LAYOUT)
    turns = mpirun(hosts, "--map-by", "node", *LAYOUT)
    uneven = mpirun(hosts, "-np", "3", *LAYOUT)
    listed = mpirun(hosts, "-np", "3", "-x", "MESHRUN_NPROC_PER_NODE=2,1", *LAYOUT)

    assert sorted(even.stdout.splitlines()) == [f"{rank} of 4 on (2, 2)" for rank in range(4)]
    assert "round-robin over nodes" in turns.stderr
    assert "conflicting numbers of ranks" in uneven.stderr
    assert sorted(listed.stdout.splitlines()) == [f"{rank} of 3 on (2, 1)" for rank in range(3)]


@pytest.mark.nightly
def test_one_host_meets_on_loopback(slurm: Slurm) -> None:
    """No other host needs to reach it."""
    env = {"MESHRUN_MESH": "tp=-1", "MESHRUN_DEVICE": "cpu"}
    ours = slurm.srun("--nodes=1", "--ntasks=2", *TASK, env=env)

    assert sorted(ours.stdout.splitlines()) == [
        "0 (0,) 1 127.0.0.1 lo",
        "1 (1,) 1 127.0.0.1 lo",
    ], ours.stderr


def test_a_layout_is_known_in_every_task(slurm: Slurm) -> None:
    """On uneven nodes too; a batch script and a shell count as one rank."""
    tasks = slurm.srun("--nodes=3", "--ntasks=4", *LAYOUT)
    script = slurm.sbatch(" ".join(LAYOUT), "--nodes=2", "--ntasks=4")
    shell = slurm.salloc("--nodes=2", "--ntasks=4", *LAYOUT)

    assert sorted(tasks.stdout.splitlines()) == [
        f"{rank} of 4 on (2, 1, 1)" for rank in range(4)
    ], tasks.stderr
    assert (script, shell.stdout) == ("0 of 1 on (1,)\n",) * 2, shell.stderr


@pytest.mark.nightly
def test_a_shell_on_a_node_is_no_task(slurm: Slurm, tmp_path: Path) -> None:
    """It has the variables of one of two tasks, but only what it starts with srun are tasks."""
    script = tmp_path / "shell"
    srun = f"srun --overlap --nodes=2 --ntasks=2 {' '.join(LAYOUT)}"
    script.write_text(f"#!/bin/sh\n{' '.join(LAYOUT)}\n{srun}\n")
    script.chmod(0o755)
    typed = f"srun --immediate=30 --nodes=2 --ntasks=2 --pty {script}"
    ours = slurm.run(["script", "--quiet", "--command", typed, "/dev/null"], stdin=-3)

    lines = [line for line in ours.stdout.splitlines() if " of " in line]
    assert lines[0].endswith("0 of 1 on (1,)"), ours.stdout
    assert sorted(lines[1:]) == ["0 of 2 on (1, 1)", "1 of 2 on (1, 1)"]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI needs mpirun")
def test_mpirun_in_an_allocation_gives_a_layout(slurm: Slurm) -> None:
    """Its daemon on the other node is a Slurm task, but its processes are not."""
    words = ["mpirun", "--allow-run-as-root", *LAYOUT]
    ours = slurm.salloc("--nodes=2", "--ntasks-per-node=2", *words)

    assert sorted(ours.stdout.splitlines()) == [f"{rank} of 4 on (2, 2)" for rank in range(4)], (
        ours.stderr
    )


@pytest.mark.nightly
def test_a_job_that_a_task_submits_is_no_task(slurm: Slurm, tmp_path: Path) -> None:
    """Although its script inherits the task's variables."""
    script, output = tmp_path / "job", tmp_path / "out"
    script.write_text(f"#!/bin/sh\n{' '.join(LAYOUT)}\n")
    submit = f"[ $SLURM_PROCID = 1 ] || sbatch --wait --nodes=1 --output={output} {script}"
    slurm.srun("--nodes=2", "--ntasks=2", "sh", "-c", submit)

    assert output.read_text() == "0 of 1 on (1,)\n"


@pytest.mark.nightly
def test_tasks_that_go_round_the_nodes_are_an_error(slurm: Slurm) -> None:
    """Every rank fails, so that none waits for the others."""
    ours = slurm.srun("--nodes=2", "--ntasks=4", "--distribution=cyclic", *LAYOUT)

    assert ours.stderr.count("round-robin over nodes") == 4
    assert ours.stdout == ""


@pytest.mark.nightly
def test_a_launchers_variables_precede_those_of_a_task(slurm: Slurm) -> None:
    """A rank started inside a task belongs to its launcher."""
    ours = slurm.srun("--nodes=1", "--ntasks=2", *LAYOUT, env={"RANK": "5", "WORLD_SIZE": "8"})

    assert ours.stdout == "5 of 8 on (8,)\n" * 2, ours.stderr
    assert "RANK" not in os.environ
