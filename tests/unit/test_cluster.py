"""What is read from the environment that real schedulers set."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshrun.cluster import ClusterFacts, Task, derive_port, detect_cluster
from meshrun.errors import UsageError
from meshrun.plan.request import LaunchRequest, Program
from meshrun.plan.scheduler_defaults import fit_to_cluster
from tests.schedulers import (
    BATCH,
    GROUP,
    MPI,
    PYTORCH_JOB,
    SALLOC,
    SKY,
    STEP,
    STEP_OF_DAEMON,
    TRAINER,
)


def detect(env: dict[str, str], hostname: str = "here", **more: bool) -> ClusterFacts:
    facts = detect_cluster(env, hostname=hostname, **more)
    assert facts is not None
    return facts


def test_nothing_is_found_in_nothing() -> None:
    """Nor in the variables of a launcher."""
    assert detect_cluster({}, hostname="here") is None
    assert detect_cluster({"RANK": "0", "WORLD_SIZE": "2"}, hostname="here") is None


def test_a_task_of_a_slurm_step() -> None:
    """Every number comes from the step, and the port from its name."""
    assert detect(STEP) == ClusterFacts(
        system="Slurm",
        evidence="step 0 of job 7 (SLURM_STEP_ID)",
        job_id="7.0",
        nnodes=3,
        node_rank=1,
        hosts=("sl0", "sl1", "sl2"),
        head=("sl0", "10.77.0.1"),
        port=derive_port("7.0"),
        task=Task(
            rank=2, world_size=4, local_rank=0, local_world_size=1, per_node=(2, 1, 1)
        ),
        one_a_node="srun --ntasks-per-node=1 meshrun ...",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("b8.sl1", "block.node", "b8"),
        ("s0.s4.s8.sl1", "switch.switch.switch.node", "s0.s4.s8"),
        ("sl1", "node", ""),
        ("t:0:1:2.sl1", "torus:x:y:z.node", ""),
        ("", "", ""),
        ("b8.x.sl1", "block.node", "b8.x"),
    ],
)
def test_the_block_or_leaf_switch_of_a_slurm_node(address: str, pattern: str, domain: str) -> None:
    """As topology/block and topology/tree say it; without a topology there is none."""
    topology = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    facts = detect({**STEP, **topology})
    request = LaunchRequest(program=Program(kind="script", target="train.py"))

    assert facts.domain == domain
    assert fit_to_cluster(request, replace(facts, task=None)).rendezvous.domain == domain


def test_several_tasks_on_a_slurm_node() -> None:
    """Which of them this is, and how many there are."""
    changed = {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,1"}
    facts = detect({**STEP, **changed})

    assert (facts.node_rank, facts.launchers_on_node, facts.launcher_on_node) == (0, 2, 1)


def test_tasks_that_go_round_the_nodes() -> None:
    """Each task of a node that has several knows, its first one too."""
    shape = {"SLURM_STEP_TASKS_PER_NODE": "2,2", "SLURM_TASKS_PER_NODE": "2,2"}
    nodes = {"SLURM_STEP_NODELIST": "sl[0-1]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2"}
    round_them = {**STEP, **shape, **nodes, "SLURM_NODEID": "0", "SLURM_GTIDS": "0,2"}
    tasks = [
        detect({**round_them, "SLURM_PROCID": str(2 * local), "SLURM_LOCALID": str(local)}).task
        for local in range(2)
    ]

    assert [task.in_blocks for task in tasks if task] == [False, False]


@pytest.mark.parametrize(
    ("env", "job_id", "nnodes", "note"),
    [
        (BATCH, "3", 2, "SLURM_PROCID without SLURM_STEP_ID: a batch script, not a task"),
        (SALLOC, "4", 2, "SLURM_JOB_ID without SLURM_STEP_ID: an salloc shell, not a task"),
        ({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)}, "3", 2, "SLURM_STEP_ID 4294967291: a batch"),
        ({**STEP, "SLURM_PTY_PORT": "39009"}, "7", 3, "SLURM_PTY_PORT: a shell of `srun --pty`"),
        ({**STEP, **BATCH}, "3", 2, "SLURM_STEP_ID 0 of another job: a batch script"),
    ],
)
def test_a_shell_inside_an_allocation_is_no_task(
    env: dict[str, str], job_id: str, nnodes: int, note: str
) -> None:
    """Not even with the numbers of one; it is told what to type."""
    facts = detect(env)

    assert (facts.task, facts.nnodes, facts.node_rank, facts.job_id) == (None, nnodes, None, job_id)
    assert facts.shell == "srun --ntasks-per-node=1 meshrun ..."
    assert facts.notes[0].startswith(note)


def test_a_step_inside_a_shell_is_one_of_tasks() -> None:
    """They inherit the shell's variables, and have no terminal."""
    env = {**STEP, "SLURM_PTY_PORT": "39009"}

    assert detect(env, terminal=False) == detect(STEP)
    assert detect(env, terminal=True).shell is not None


def test_a_process_of_mpirun() -> None:
    """Its node follows from the ranks; the coordinator's address and the secret are mpirun's."""
    assert detect(MPI) == ClusterFacts(
        system="Open MPI",
        evidence="process 3 of 4 (OMPI_COMM_WORLD_RANK)",
        job_id="739835905",
        nnodes=2,
        node_rank=1,
        head=("10.77.0.1", "192.168.0.9"),
        port=derive_port("739835905"),
        launchers_on_node=2,
        launcher_on_node=1,
        task=Task(rank=3, world_size=4, local_rank=1, local_world_size=2, per_node=(2, 2)),
        secret="4136b6c6b552b7cb-492945d51d07d3de",
        one_a_node="mpirun -npernode 1 --bind-to none meshrun ...",
    )


@pytest.mark.parametrize(
    ("numbers", "nodes", "expected"),
    [
        ((2, 0, 1, 3), "3", (3, 2, True)),  # one a node: the node is the rank
        ((1, 1, 2, 2), "1", (1, 0, True)),
        ((1, 0, 2, 4), "2", (2, 1, False)),  # --map-by node
        ((4, 0, 1, 5), "3", (3, None, True)),  # two, two and one: the others' sizes are not told
        ((3, 1, 2, 4), "", (2, 1, True)),  # Open MPI 5 says no number of nodes
        ((2, 0, 2, 5), "", (None, None, True)),
    ],
)
def test_the_node_of_a_process_of_mpirun(
    numbers: tuple[int, ...], nodes: str, expected: tuple[object, ...]
) -> None:
    """It is in no variable, so it is worked out where it can be."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "SIZE")
    env = {
        f"OMPI_COMM_WORLD_{name}": str(number) for name, number in zip(names, numbers, strict=True)
    }
    facts = detect({**env, "OMPI_MCA_orte_num_nodes": nodes})

    assert facts.task is not None
    assert (facts.nnodes, facts.node_rank, facts.task.in_blocks) == expected
    assert (facts.job_id, facts.port, facts.head) == (None, None, ())


def test_the_innermost_system_counts() -> None:
    """mpirun's daemons are steps of Slurm, and an allocation may be around all."""
    inside_a_step = detect({**MPI, **STEP_OF_DAEMON})
    inside_a_shell = detect({**MPI, **SALLOC})
    in_a_pod = detect({**SKY, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "x"})

    assert (inside_a_step.system, inside_a_shell.system) == ("Open MPI", "Open MPI")
    assert inside_a_step.notes == (
        "Slurm: step 0 of job 8 (SLURM_STEP_ID), around Open MPI",
    )  # fmt: skip
    assert inside_a_shell.notes == ("Slurm: job 4 (SLURM_JOB_ID), around Open MPI",)
    assert (in_a_pod.system, in_a_pod.notes) == ("SkyPilot", ())


def test_a_node_of_skypilot() -> None:
    """One process a node, with the addresses of all."""
    facts = detect(SKY)

    assert (facts.nnodes, facts.node_rank, facts.task) == (2, 1, None)
    assert (facts.hosts, facts.head) == (("10.0.0.4", "10.0.0.9"), ("10.0.0.4",))
    assert (facts.job_id, facts.port) == (
        SKY["SKYPILOT_TASK_ID"],
        derive_port(SKY["SKYPILOT_TASK_ID"]),
    )


@pytest.mark.parametrize(
    ("env", "hostname", "expected"),
    [
        (TRAINER, "run-node-0-2", ("Kubeflow Trainer", 4, 2, ("run-node-0-0.run",), 29500)),
        (PYTORCH_JOB, "mnist-worker-1",
         ("Kubeflow PyTorchJob", 3, 2, ("mnist-master-0",), 23456)),
        (GROUP, "vllm-0-1",
         ("LeaderWorkerSet", 2, 1, ("vllm-0.vllm.default",), derive_port("vllm-0.vllm.default"))),
        ({"JOB_COMPLETION_INDEX": "3"}, "train-3",
         ("Kubernetes Indexed Job", None, 3, ("train-0",), derive_port("train"))),
        ({"JOB_COMPLETION_INDEX": "3"}, "train-3.svc.ns.svc.cluster.local",
         ("Kubernetes Indexed Job", None, 3, ("train-0.svc.ns.svc.cluster.local", "train-0"),
          derive_port("train"))),
        ({"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "set", "JOBSET_RESTART_ATTEMPT": "2"},
         "set-nodes-0-1",
         ("JobSet", None, 1, ("set-nodes-0-0.set", "set-nodes-0-0"),
          derive_port("set-nodes-0/2"))),
        ({"JOB_COMPLETION_INDEX": "1"}, "other", ("Kubernetes Indexed Job", None, 1, (), None)),
    ],
)  # fmt: skip
def test_pods(env: dict[str, str], hostname: str, expected: tuple[object, ...]) -> None:
    """One launcher a pod; only what the pod is told is taken for known."""
    facts = detect(env, hostname)

    assert (facts.system, facts.nnodes, facts.node_rank, facts.head, facts.port) == expected
    assert (facts.task, facts.shell) == (None, None)


def test_a_rank_in_a_pod_is_no_pod_of_a_pytorch_job() -> None:
    """A launcher there sets LOCAL_RANK too, and another MASTER_ADDR is another job's."""
    assert detect_cluster({**PYTORCH_JOB, "LOCAL_RANK": "0"}, hostname="mnist-worker-1") is None
    assert detect_cluster(PYTORCH_JOB, hostname="other-worker-1") is None
    assert detect_cluster(PYTORCH_JOB, hostname="laptop") is None


@pytest.mark.parametrize(
    ("env", "name", "value"),
    [
        (STEP, "SLURM_PROCID", "4"),
        (STEP, "SLURM_PROCID", "-1"),
        (STEP, "SLURM_NODEID", "3"),
        (STEP, "SLURM_LOCALID", "1"),
        (STEP, "SLURM_STEP_ID", "soon"),
        (STEP, "SLURM_STEP_NUM_TASKS", "0"),
        (STEP, "SLURM_STEP_NODELIST", "sl[0-"),
        (STEP, "SLURM_STEP_TASKS_PER_NODE", "2(x"),
        (MPI, "OMPI_COMM_WORLD_RANK", "4"),
        (MPI, "OMPI_COMM_WORLD_SIZE", "٣"),
        (MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        (MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "8"),
        (MPI, "OMPI_MCA_orte_num_nodes", "9" * 30),
        (SKY, "SKYPILOT_NODE_RANK", "2"),
        (SKY, "SKYPILOT_NODE_IPS", "10.0.0.4"),
        (TRAINER, "PET_NODE_RANK", "4"),
        (GROUP, "LWS_WORKER_INDEX", "2"),
        ({}, "JOB_COMPLETION_INDEX", "1.5"),
    ],
)
def test_a_broken_variable_is_named(env: dict[str, str], name: str, value: str) -> None:
    """With what it holds, whatever that is."""
    with pytest.raises(UsageError, match=f"{name}.*`{re.escape(value)}`"):
        detect_cluster({**env, name: value}, hostname="here")


def test_half_a_slurm_step_is_told() -> None:
    """As when only some variables got into a container."""
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS, SLURM_NODEID"):
        detect_cluster(env, hostname="here")


REAL = [STEP, BATCH, SALLOC, MPI, SKY, TRAINER, PYTORCH_JOB, GROUP]
NAMES = sorted({name for env in REAL for name in env} | {"SLURM_PTY_PORT", "JOBSET_NAME"})
VALUES = st.one_of(
    st.sampled_from(sorted({value for env in REAL for value in env.values()})),
    st.text(max_size=30),
    st.integers(-2, 2**70).map(str),
)


@example([], {"SLURM_JOB_ID": "7", "SLURM_STEPID": "0"}, "")
@given(st.lists(st.sampled_from(REAL)), st.dictionaries(st.sampled_from(NAMES), VALUES), st.text())
def test_whatever_the_environment_holds(
    real: list[dict[str, str]], changed: dict[str, str], hostname: str
) -> None:
    """There are facts that agree with themselves, nothing, or an error that says what is wrong."""
    env = {name: value for each in [*real, changed] for name, value in each.items()}
    try:
        facts = detect_cluster(env, hostname=hostname)
    except UsageError as error:
        assert any(name in error.message for name in env), error
        return
    if facts is not None and facts.nnodes is not None and facts.node_rank is not None:
        assert 0 <= facts.node_rank < facts.nnodes
    if facts is not None and facts.task is not None:
        assert facts.shell is None
        assert 0 <= facts.task.local_rank < facts.task.local_world_size <= facts.task.world_size
        assert 0 <= facts.task.rank < facts.task.world_size


@given(st.text())
def test_a_port_follows_from_the_job(job_id: str) -> None:
    """The same on every node, and none that the kernel gives away."""
    assert 20000 <= derive_port(job_id) < 30000
    assert derive_port("7.0") == derive_port("7.0") != derive_port("7.1")
