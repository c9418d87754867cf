"""meshrun as users start it: Kubernetes, SkyPilot, Slurm scripts and shells, mpirun."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.engines.hosts import MakeHosts
from tests.engines.openmpi import Mpirun
from tests.engines.slurm import Slurm
from tests.engines.together import Launch, all_gone, as_shell, end_all, rank_lines, wait_for_all
from tests.kit import PROGRAMS, command, run_meshrun, wait_until
from tests.variations import ordinary

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--mesh", "dp=2,tp=2")
HEAD = "job-0.service"
SAVES = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
time.sleep(1000)
"""


def check_mesh(launches: Sequence[Launch]) -> None:
    """Check that two ranks ran on each of two hosts, with rank 0 on the first."""
    texts = [launch.text for launch in launches]
    assert end_all(launches) == [0, 0], "\n---\n".join(launch.text for launch in launches)
    texts = [launch.text for launch in launches]
    ranks = [[line.split()[1] for line in rank_lines(text)] for text in texts]
    assert ranks == [["0", "1"], ["2", "3"]]


# ---- Kubernetes ----------------------------------------------------------------------------


# The host names, and the variables of each of two hosts; NODE stands for its number.
PLATFORMS: dict[str, tuple[str, dict[str, str]]] = {
    # RANK and WORLD_SIZE count pods; the first pod's MASTER_ADDR is localhost.
    "PyTorchJob": ("train-worker-", {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_PORT": "23456", "WORLD_SIZE": "2",
        "RANK": "NODE", "MASTER_ADDR": "train-worker-0",
    }),
    "Kubeflow Trainer": ("node", {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "NODE",
        "PET_MASTER_ADDR": HEAD, "PET_MASTER_PORT": "29500",
    }),
    # The meeting point follows from the job's name and the pods' indices.
    "Indexed Job": ("train-", {"JOB_COMPLETION_INDEX": "NODE", "PET_NNODES": "2"}),
    "SkyPilot": ("node", {
        "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "NODE", "SKYPILOT_TASK_ID": "sky-1-train",
    }),
}  # fmt: skip


@pytest.mark.parametrize("platform", ordinary(PLATFORMS, "PyTorchJob"))
def test_the_variables_of_a_platform_are_enough(platform: str, make_hosts: MakeHosts) -> None:
    """Nothing else is set, in the environment or on the command line."""
    name, variables = PLATFORMS[platform]
    hosts = make_hosts(2, name=name)
    launches = []
    for node in range(2):
        hosts.add_name(node, HEAD, hosts.addresses[0])
        env = {key: value.replace("NODE", str(node)) for key, value in variables.items()}
        if platform == "PyTorchJob" and node == 0:
            env["MASTER_ADDR"] = "localhost"
        launches.append(Launch(hosts, node, [*MESH, SAYS], env=env))

    check_mesh(launches)


@pytest.mark.nightly
def test_pods_of_an_elastic_job_come_back(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """With the manifest's command, a preempted pod starts again and rejoins the others."""
    hosts = make_hosts(2, name="train-")
    manifest = run_meshrun(
        "--submit", "kubernetes", "--image", "a", "--rdzv-id", "train", "--nnodes", "1:2",
        "--rdzv-conf", "last_call_timeout=20", "--mesh", "dp=1:2", "--nproc-per-node", "1",
        "--device", "cpu", "-n", PROGRAMS / "elastic.py", tmp_path,
    )  # fmt: skip
    *_, job = yaml.safe_load_all(manifest.stdout)
    meshrun, *words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    for host in range(2):
        hosts.add_name(host, "train-0.train", hosts.addresses[0])

    def pod(index: int) -> Launch:
        return Launch(hosts, index, words, env={"JOB_COMPLETION_INDEX": str(index)})

    pods = [pod(1), pod(0)]  # the order does not matter
    wait_for_all(pods, "in 0 on")
    pods[0].send(signal.SIGTERM)
    code = as_shell(pods[0].end())
    pods[1].wait_for("in 1 on")
    again = pod(1)
    again.wait_for("in 2 on")
    (tmp_path / "go").touch()
    rules = job["spec"]["podFailurePolicy"]["rules"]

    assert meshrun == "meshrun"
    assert code in rules[0]["onExitCodes"]["values"]
    assert end_all([again, pods[1]]) == [0, 0], pods[1].text


# ---- Slurm ---------------------------------------------------------------------------------


def typed(*words: str | Path) -> str:
    """Return a meshrun command line for a script."""
    return shlex.join(command(*words))


@pytest.mark.nightly
def test_a_batch_script_with_srun_is_enough(slurm: Slurm) -> None:
    """Its first node need not be the cluster's first."""
    printed = slurm.sbatch(
        f"srun {typed('--no-prefix', *MESH, SAYS)}",
        "--nodes=2", "--nodelist=sl[1-2]", "--ntasks-per-node=1",
    )  # fmt: skip

    assert "rank 0 of 4 on sl1: dp 0 tp 0, sum 6" in printed, printed
    assert "rank 3 of 4 on sl2: dp 1 tp 1, sum 6" in printed


@pytest.mark.usefixtures("fake_torch")
def test_scancel_ends_every_rank(slurm: Slurm, tmp_path: Path) -> None:
    """Each gets SIGTERM and can save; no process of the job is left on any host."""
    output, program = tmp_path / "output", tmp_path / "saves.py"
    program.write_text(SAVES)
    with open(output, "wb") as file:
        job = slurm.popen(
            "srun", "-N2", "--ntasks-per-node=1", "--job-name=mine", "--kill-on-bad-exit=0",
            *command("--no-prefix", "--nproc-per-node", "2", program), stdout=file, stderr=file,
        )  # fmt: skip
    wait_until(lambda: output.read_text().count("up") == 4, output.read_text)
    slurm.scancel("--name=mine")

    assert job.wait(timeout=60) != 0
    assert output.read_text().count("meshrun: stopped by SIGTERM") == 2, output.read_text()
    slurm.wait_idle()
    hosts = slurm.hosts
    wait_until(lambda: not hosts.launches(), lambda: f"{hosts.launches()}\n{output.read_text()}")


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
def test_unbuffered_output_is_plain_text(slurm: Slurm) -> None:
    """``srun --unbuffered`` gives each task a terminal, though its output may go to a file."""
    words = ("--nproc-per-node", "1", "--no-python", "echo", "done")
    task = ("srun", "--immediate=30", "--unbuffered", "--ntasks-per-node=1", "--nodes=2")
    done = slurm.run([*task, *command(*words)], env={"TERM": "xterm"})

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] done", "[rank 1] done"]


@pytest.mark.nightly
def test_a_shell_on_one_node_launches_there(slurm: Slurm, tmp_path: Path) -> None:
    """meshrun typed into ``srun --pty bash`` is an ordinary launch."""
    script = tmp_path / "shell"
    script.write_text(f"#!/bin/sh\n{typed('--no-prefix', '--mesh', 'tp=2', SAYS)}\n")
    script.chmod(0o755)
    line = f"srun --immediate=30 --nodes=1 --ntasks=1 --pty {script}"
    done = slurm.run(["script", "--quiet", "--command", line, "/dev/null"], stdin=-3)

    assert "rank 0 of 2 on sl" in done.stdout, done.stdout
    assert "rank 1 of 2 on sl" in done.stdout
    assert "error" not in done.stdout


# ---- Open MPI ------------------------------------------------------------------------------


@pytest.mark.nightly
def test_cores_that_mpirun_binds_to_are_reported(make_hosts: MakeHosts, mpirun: Mpirun) -> None:
    """mpirun gives each process one core, which all workers of a node would share."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be taken away")
    hosts = make_hosts(2)
    words = command("--no-prefix", *MESH, SAYS)
    bound = mpirun(hosts, "-npernode", "1", "--bind-to", "core", *words)
    free = mpirun(hosts, "-npernode", "1", "--bind-to", "none", *words)

    assert (bound.returncode, free.returncode) == (0, 0), bound.stderr + free.stderr
    warning = "binds 2 workers to 1 of "
    assert warning in bound.stderr
    assert "mpirun --bind-to none" in bound.stderr
    assert warning not in free.stderr
    all_gone(hosts)
