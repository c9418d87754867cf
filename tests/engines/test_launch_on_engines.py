"""meshrun under a real scheduler, with no nodes, ranks or ports on its command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines.openmpi import Mpirun
from tests.engines.slurm import FIRST_TWO, Slurm
from tests.kit import PROGRAMS, command

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"


@pytest.mark.parametrize("gpus", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_srun_is_enough(slurm: Slurm, gpus: int) -> None:
    """One launcher per node: the mesh spans the nodes; GPUs that torch cannot use do no harm."""
    asked, device = ([f"--gpus-per-node={gpus}"], ["--device", "cpu"]) if gpus else ([], [])
    words = command("--mesh", "dp=2,tp=2", *device, "--no-prefix", SAYS)
    done = slurm.srun(FIRST_TWO, "--ntasks-per-node=1", *asked, *words)

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 4 on sl0: dp 0 tp 0, sum 6",
        "rank 1 of 4 on sl0: dp 0 tp 1, sum 6",
        "rank 2 of 4 on sl1: dp 1 tp 0, sum 6",
        "rank 3 of 4 on sl1: dp 1 tp 1, sum 6",
    ]
    assert "Slurm, step 0 of job" in done.stderr
    assert done.stderr.count("Slurm, step") == 1


def test_one_launcher_per_gpu_gets_a_hint(slurm: Slurm) -> None:
    """Several launchers on one node are an error, with a hint that gives the right command."""
    done = slurm.srun("-N2", "--ntasks-per-node=2", *command("--mesh", "dp=2,tp=2", SAYS))

    assert done.returncode == 2
    assert done.stderr.count("Slurm started meshrun 4 times on 2 nodes, but one") == 1
    assert done.stderr.count("hint: srun --ntasks-per-node=1 meshrun") == 1


@pytest.mark.nightly
def test_nodes_under_one_switch_are_a_domain(slurm: Slurm, tmp_path: Path) -> None:
    """Each node learns its switches from Slurm; the nodes exchange them and place ranks by them."""
    program = tmp_path / "domains.py"
    program.write_text(
        "from meshrun import current_layout\n"
        "layout = current_layout()\n"
        "print(layout.own_rank, layout.domain(), layout.nodes_per_domain, layout.slot_order)\n"
    )
    mesh = ("--mesh", "tp=2,dp=3", "--nproc-per-node", "2", "--no-prefix")
    options = (*mesh, "--intra-domain", "tp")
    placed = ("--place", "auto", *options)
    done = slurm.srun("-N3", "--ntasks-per-node=1", *command(*placed, program))
    refused = slurm.srun("-N3", "--ntasks-per-node=1", *command(*options, program))

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} {rank % 3 // 2} (2, 1) ('dp', 'tp')" for rank in range(6)
    ]
    assert refused.returncode == 2
    assert "--intra-domain: 2 of 3 groups of tp cross domains (2 nodes each" in refused.stderr
    assert refused.stdout == ""


def test_each_task_becomes_its_rank(slurm: Slurm) -> None:
    """On uneven nodes too; a mesh that does not fit is reported once, before anything starts."""
    srun = (FIRST_TWO, "-n3", "--kill-on-bad-exit")
    words = ("--per-task", "--device", "cpu", "--mesh")
    done = slurm.srun(*srun, *command(*words, "dp=3,tp=1", SAYS), timeout=110)
    refused = slurm.srun(*srun[:2], *command(*words, "dp=2,tp=2", SAYS))

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[2] == "rank 2 of 3 on sl1: dp 2 tp 0, sum 3"
    assert refused.returncode == 2
    assert refused.stderr.count("error: mesh `dp=2,tp=2` needs 4 workers") == 1


@pytest.mark.nightly
def test_a_node_with_two_launchers_keeps_no_other_node_waiting(slurm: Slurm) -> None:
    """The launchers of the other nodes notice it too, and exit."""
    done = slurm.srun("-N3", "-n4", *command("--mesh", "dp=3", SAYS))

    assert done.returncode == 2
    assert done.stderr.count("Slurm started meshrun 4 times on 3 nodes (2, 1, 1)") == 1
    assert not re.search("^(?!srun:).*waiting", done.stderr, re.MULTILINE), done.stderr


def test_mpirun_is_enough(make_hosts, mpirun: Mpirun) -> None:  # type: ignore[no-untyped-def]
    """One launcher per host."""
    hosts = make_hosts(2)
    done = mpirun(
        hosts, "-npernode", "1", "--bind-to", "none", *command("--mesh", "dp=2,tp=2", SAYS)
    )

    assert done.returncode == 0, done.stdout + done.stderr
    last = "[dp1 tp1] rank 3 of 4 on node1: dp 1 tp 1, sum 6"  # mpirun's terminal gets no colors
    assert sorted(done.stdout.splitlines())[-1] == last
