"""The tests' Slurm and Open MPI are real and work across several hosts."""

from __future__ import annotations

import sys

import pytest

from meshrun.cluster.batch import expand_hosts
from tests.engines.hosts import MakeHosts
from tests.engines.openmpi import Mpirun
from tests.engines.slurm import FIRST_TWO, Slurm
from tests.kit import wait_until


def test_srun_reaches_each_host(slurm: Slurm) -> None:
    """One task runs on each, and srun passes on the exit code."""
    named = slurm.srun("--nodes=3", "--ntasks-per-node=1", "hostname")
    failed = slurm.srun("--nodes=1", "sh", "-c", "exit 7")

    assert sorted(named.stdout.split()) == ["sl0", "sl1", "sl2"], named.stderr + slurm.log()
    assert failed.returncode == 7


def test_a_batch_script_and_an_allocation_run(slurm: Slurm) -> None:
    """On the requested nodes, with srun inside."""
    batch = slurm.sbatch("hostname; srun hostname", FIRST_TWO, "--ntasks-per-node=1")
    held = slurm.salloc(FIRST_TWO, "sh", "-c", "echo $SLURM_JOB_NODELIST")

    assert sorted(batch.split()) == ["sl0", "sl0", "sl1"]
    assert held.stdout == "sl[0-1]\n", held.stderr


def test_slurm_hands_out_gpus(slurm: Slurm) -> None:
    """Each task sees its node's GPUs."""
    shown = slurm.srun("--nodes=2", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")

    assert shown.stdout == "0,1\n0,1\n", shown.stderr + slurm.log()


def test_slurm_gives_the_switches_of_a_node(slurm: Slurm) -> None:
    """meshrun reads the leaf switch and those above it."""
    ask = (
        "import os; from meshrun.cluster import Surroundings;"
        " from meshrun.cluster.batch import detect_step;"
        " found = detect_step(Surroundings(os.environ, 'here'));"
        " print(found.domain, os.environ['SLURM_TOPOLOGY_ADDR_PATTERN'])"
    )
    shown = slurm.srun("--nodes=3", "--ntasks-per-node=1", sys.executable, "-c", ask)

    assert sorted(shown.stdout.splitlines()) == [
        "top.leaf0 switch.switch.node",
        "top.leaf0 switch.switch.node",
        "top.leaf1 switch.switch.node",
    ], shown.stderr + slurm.log()


def test_scancel_ends_a_job(slurm: Slurm) -> None:
    """On every host; the cluster is then ready for the next job."""
    job = slurm.popen("srun", "--nodes=3", "--job-name=mine", "sleep", "1000")
    try:
        listed = ["squeue", "--noheader", "--states=running", "--format=%j"]
        wait_until(lambda: "mine" in slurm.run(listed).stdout, lambda: f"the job\n{slurm.log()}")
        slurm.scancel("--name=mine")
        assert job.wait(timeout=60) != 0
    finally:
        job.kill()
        job.wait()
    slurm.wait_idle()


@pytest.mark.parametrize("own_name", ["address", "loopback", "nothing"])
def test_mpirun_reaches_each_host(make_hosts: MakeHosts, mpirun: Mpirun, own_name: str) -> None:
    """One process per slot, whatever the host's own name resolves to."""
    hosts = make_hosts(3, own_name=own_name)
    shown = mpirun(hosts, "hostname", slots=2)

    assert sorted(shown.stdout.split()) == ["node0", "node0", "node1", "node1", "node2", "node2"], (
        shown.stderr
    )


def test_node_lists_are_read_as_scontrol_reads_them(slurm: Slurm) -> None:
    """With leading zeros, several brackets, and the order kept."""
    for text in ("sl[0-2]", "sl[1-3,7],gpu-a[01-10]", "b[9-11],a,c[007,8]", "r[0-1]n[08-10]"):
        theirs = slurm.run(["scontrol", "show", "hostnames", text]).stdout.split()
        assert expand_hosts(text) == tuple(theirs)
