"""The facts that meshrun reads from the variables of real schedulers."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from meshrun.cluster import ClusterFacts, Surroundings, Task, derive_port, detect_cluster
from meshrun.cluster.batch import place_of
from meshrun.errors import UsageError
from meshrun.plan.scheduler_defaults import apply_cluster
from tests.plans import request_of
from tests.schedulers import (
    AWS_BATCH,
    AZURE_ML,
    AZURE_OLD,
    BATCH,
    DETERMINED,
    DSTACK,
    FILES,
    FLUX,
    GRIDENGINE,
    GROUP,
    HET_SHELL,
    HET_STEP,
    HYDRA,
    INTEL,
    JSRUN,
    LSF,
    MPI,
    MPI_5,
    MVAPICH,
    PALS,
    PBS,
    PRRTE,
    PYTORCH_JOB,
    RAY_JOB,
    RAY_WORKER,
    SAGEMAKER,
    SALLOC,
    SKY,
    SLICES,
    STEP,
    STEP_OF_DAEMON,
    TPU,
    TRAINER,
    VERTEX,
    VOLCANO,
)


def read(path: str) -> str:
    try:
        return FILES[path]
    except KeyError:
        raise FileNotFoundError(path) from None


def detect(env: dict[str, str], hostname: str = "here", **more: bool) -> ClusterFacts:
    facts = detect_cluster(Surroundings(env, hostname=hostname, read=read, **more))
    assert facts is not None
    return facts


def found(env: dict[str, str], **more: bool) -> ClusterFacts:
    return replace(detect(env, **more), variables=())


def test_nothing_is_found_in_an_empty_environment() -> None:
    """Nor in the variables that a launcher sets."""
    assert detect_cluster(Surroundings({}, hostname="here")) is None
    assert detect_cluster(Surroundings({"RANK": "0", "WORLD_SIZE": "2"}, hostname="here")) is None


def test_a_task_of_a_slurm_step_knows_its_node() -> None:
    """All numbers come from the step, and the port from its id."""
    assert found(STEP) == ClusterFacts(
        system="Slurm",
        evidence="step 0 of job 7 (SLURM_STEP_ID)",
        job_id="7.0",
        nnodes=3,
        node_rank=1,
        hosts=("sl0", "sl1", "sl2"),
        coordinator=("sl0", "10.77.0.1"),
        port=derive_port("7.0"),
        task=Task(
            rank=2, world_size=4, local_rank=0, local_world_size=1, per_node=(2, 1, 1)
        ),
        one_a_node="srun --ntasks-per-node=1 meshrun ...",
        more_cores="srun --cpus-per-task={workers} gives each worker a core",
        repeats_sigterm=True,
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
    """From topology/block or topology/tree; without a topology there is none."""
    topology = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    facts = detect({**STEP, **topology})
    request = request_of()

    assert facts.domain == domain
    assert apply_cluster(request, replace(facts, task=None)).rendezvous.domain == domain


def test_a_step_of_a_heterogeneous_job_numbers_nodes_by_component() -> None:
    """Slurm lists its nodes and their tasks by name, but numbers them by component."""
    facts = detect(HET_STEP)
    of_one = {"SLURM_NTASKS": "3", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "sl[0-1]",
              "SLURM_STEP_NODELIST": "sl[0-1]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0",
              "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
              "SLURM_PROCID": "0"}  # fmt: skip
    alone = detect({**HET_STEP, **of_one})
    shell = detect(HET_SHELL)

    assert (facts.hosts, facts.node_rank, facts.coordinator) == (("sl2", "sl0", "sl1"), 1, ("sl2",))
    assert facts.task is not None
    assert (facts.task.per_node, facts.task.in_blocks) == ((2, 2, 1), True)
    assert alone.hosts == ("sl0", "sl1")
    assert (shell.nnodes, shell.hosts) == (3, ("sl2", "sl0", "sl1"))
    assert shell.shell == "srun --het-group=0-1 --ntasks-per-node=1 meshrun ..."


def test_several_tasks_may_share_a_slurm_node() -> None:
    """Which of them this is, and how many the node has."""
    changed = {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "SLURM_GTIDS": "0,1"}
    facts = detect({**STEP, **changed})

    assert facts.task is not None
    assert (facts.node_rank, facts.task.local_world_size, facts.task.local_rank) == (0, 2, 1)


def test_tasks_that_are_distributed_round_robin() -> None:
    """Each task of a node with several detects this, the first one too."""
    shape = {"SLURM_STEP_TASKS_PER_NODE": "2,2", "SLURM_TASKS_PER_NODE": "2,2"}
    nodes = {"SLURM_STEP_NODELIST": "sl[0-1]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2"}
    cyclic = {**STEP, **shape, **nodes, "SLURM_NODEID": "0", "SLURM_GTIDS": "0,2"}
    tasks = [
        detect({**cyclic, "SLURM_PROCID": str(2 * local), "SLURM_LOCALID": str(local)}).task
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
def test_a_shell_inside_an_allocation_is_not_a_task(
    env: dict[str, str], job_id: str, nnodes: int, note: str
) -> None:
    """Even if it has a task's variables; the facts say what to type."""
    facts = detect(env)

    assert (facts.task, facts.nnodes, facts.node_rank, facts.job_id) == (None, nnodes, None, job_id)
    assert facts.shell == "srun --ntasks-per-node=1 meshrun ..."
    assert facts.notes[0].startswith(note)


def test_a_step_started_in_a_shell_has_tasks() -> None:
    """They inherit the variables of `srun --pty`, but have no terminal."""
    env = {**STEP, "SLURM_PTY_PORT": "39009"}

    assert found(env, terminal=False) == found(STEP)
    assert detect(env, terminal=True).shell is not None


def test_a_process_of_mpirun_knows_its_node() -> None:
    """Its node follows from the ranks; mpirun supplies the coordinator's address and the secret."""
    assert found(MPI) == ClusterFacts(
        system="Open MPI",
        evidence="process 3 of 4 (OMPI_COMM_WORLD_RANK)",
        job_id="739835905",
        nnodes=2,
        node_rank=1,
        coordinator=("10.77.0.1", "192.168.0.9"),
        port=derive_port("739835905"),
        task=Task(rank=3, world_size=4, local_rank=1, local_world_size=2, per_node=(2, 2)),
        secret="4136b6c6b552b7cb-492945d51d07d3de",
        one_a_node="mpirun -npernode 1 --bind-to none meshrun ...",
        more_cores="mpirun --bind-to none lifts the limit",
    )


@pytest.mark.parametrize(
    ("numbers", "nodes", "expected"),
    [
        ((2, 0, 1, 3), "3", (3, 2, True)),  # one per node: the node is the rank
        ((1, 1, 2, 2), "1", (1, 0, True)),
        ((1, 0, 2, 4), "2", (2, 1, False)),  # --map-by node
        ((4, 0, 1, 5), "3", (3, None, True)),  # two, two and one: the others' sizes are unknown
        ((3, 1, 2, 4), "", (2, 1, True)),  # Open MPI 5 does not set the number of nodes
        ((2, 0, 2, 5), "", (None, None, True)),
    ],
)
def test_the_node_of_a_process_of_mpirun_is_calculated(
    numbers: tuple[int, ...], nodes: str, expected: tuple[object, ...]
) -> None:
    """No variable has it, so it is calculated where possible."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "SIZE")
    env = {
        f"OMPI_COMM_WORLD_{name}": str(number) for name, number in zip(names, numbers, strict=True)
    }
    facts = detect({**env, "OMPI_MCA_orte_num_nodes": nodes})

    assert facts.task is not None
    assert (facts.nnodes, facts.node_rank, facts.task.in_blocks) == expected
    assert (facts.job_id, facts.port, facts.coordinator) == (None, None, ())


def test_the_innermost_system_counts() -> None:
    """mpirun's daemons run in Slurm steps, and all may be in an allocation or a pod."""
    inside_a_step = detect({**MPI, **STEP_OF_DAEMON})
    inside_a_shell = detect({**MPI, **SALLOC})
    in_a_pod = detect({**SKY, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "x"})

    assert (inside_a_step.system, inside_a_shell.system) == ("Open MPI", "Open MPI")
    assert inside_a_step.notes == (
        "Slurm: step 0 of job 8 (SLURM_STEP_ID), around Open MPI",
    )  # fmt: skip
    assert inside_a_shell.notes == ("Slurm: job 4 (SLURM_JOB_ID), around Open MPI",)
    assert (in_a_pod.system, in_a_pod.notes) == ("SkyPilot", ())


def test_a_node_of_skypilot_knows_all_addresses() -> None:
    """One process per node, with the addresses of all nodes."""
    facts = detect(SKY)

    assert (facts.nnodes, facts.node_rank, facts.task) == (2, 1, None)
    assert (facts.hosts, facts.coordinator) == (("10.0.0.4", "10.0.0.9"), ("10.0.0.4",))
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
        ({**PYTORCH_JOB, "PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"},
         "mnist-worker-1", ("Kubeflow PyTorchJob", 3, 2, ("mnist-master-0",), 23456)),
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
def test_a_pod_is_a_node(env: dict[str, str], hostname: str, expected: tuple[object, ...]) -> None:
    """One launcher per pod, which knows only what the pod's environment says."""
    facts = detect(env, hostname)

    assert (facts.system, facts.nnodes, facts.node_rank, facts.coordinator, facts.port) == expected
    assert (facts.task, facts.shell) == (None, None)


@pytest.mark.parametrize(
    ("env", "hostname", "expected"),
    [
        (SAGEMAKER, "x", ("SageMaker", 2, 1, ("algo-1",), "mine-2026-07-06")),
        (AWS_BATCH, "x", ("AWS Batch", 3, 1, ("10.0.0.4",), "b6ecbc5e-1b9f/1")),
        (AZURE_ML, "x", ("Azure ML", 2, 1, ("10.0.0.4",), "calm_root_1")),
        (AZURE_OLD, "x", ("Azure ML", 2, 1, ("10.0.0.4",), "calm_root_1")),
        (VERTEX, "x", ("Vertex AI", 3, 2, ("cmle-training-workerpool0-4c-0",), "7136")),
        (VOLCANO, "job-worker-1", ("Volcano", 3, 2, ("job-master-0.job",), "job-master-0.job")),
        (DSTACK, "x", ("dstack", 2, 1, ("10.0.0.4",), "mine")),
        (DETERMINED, "x", ("Determined", 2, 1, ("10.0.0.4",), "1.e7c0.1")),
        (TPU, "job-0-1", ("TPU slice", 2, 1, ("job-0-0.job",), "job-0-0.job")),
        (SLICES, "job-0-1", ("TPU slice", 6, 5, ("job-a-0-0.job",), "job-a-0-0.job")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_container_or_replica_is_a_node(
    env: dict[str, str], hostname: str, expected: tuple[object, ...]
) -> None:
    """In systems where each container or replica is a node."""
    facts = detect(env, hostname)

    assert (
        facts.system,
        facts.nnodes,
        facts.node_rank,
        facts.coordinator,
        facts.job_id,
    ) == expected
    assert (facts.task, facts.shell) == (None, None)
    if env is not AZURE_ML:  # which sets a port itself
        assert facts.port == derive_port(str(facts.job_id))


def test_the_main_node_of_aws_batch_has_no_address() -> None:
    """The others connect to it; it is node 0 whatever its index."""
    address = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    facts = detect({**AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX": "1", address: ""})

    assert (facts.node_rank, facts.coordinator, facts.port) == (
        0,
        (),
        derive_port("b6ecbc5e-1b9f/1"),
    )


def test_a_host_is_found_among_those_of_a_job() -> None:
    """By its name with or without a domain, or by its whole address."""
    assert [place_of(own, ("n1", "n2.site")) for own in ("N1.site", "n2", "n3")] == [0, 1, None]
    assert [place_of(own, ("10.0.0.1", "10.0.0.2")) for own in ("10.0.0.2", "10.0.0.3")] == [
        1,
        None,
    ]


@pytest.mark.parametrize(
    ("env", "hostname", "expected"),
    [
        (HYDRA, "x", ("MPICH", 1, 0, (1, 2, 1, 2), ())),
        (INTEL, "x", ("Intel MPI", 1, 0, (1, 2, 1, 2), ())),
        (MPI_5, "x", ("Open MPI", 1, 0, (1, 2, 1, 2), ("vm",))),
        (MVAPICH, "x", ("MVAPICH", 2, 1, (3, 4, 1, 2), ())),
        (PALS, "x", ("PALS", 2, 1, (1, 2, 0, 1), ())),
        ({**PALS, **PBS}, "n2", ("PALS", 2, 1, (1, 2, 0, 1), ("n1.site",))),
        ({**PALS, **PBS}, "n1", ("PALS", 2, 1, (1, 2, 0, 1), ())),  # in another order
        (FLUX, "x", ("Flux", 2, 1, (1, 2, 0, 1), ())),
        ({**FLUX, "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "2"}, "x",
         ("Flux", 2, 1, (2, 4, 0, 2), ())),
        (JSRUN, "n2", ("jsrun", 2, 1, (1, 2, 0, 1), ("n1",))),
        (JSRUN, "elsewhere", ("jsrun", 2, 1, (1, 2, 0, 1), ())),
        ({**HYDRA, **SALLOC, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, "sl1",
         ("MPICH", 2, 1, (1, 2, 0, 1), ("sl0",))),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_the_processes_of_other_launchers_are_on_nodes_by_their_counts(
    env: dict[str, str], hostname: str, expected: tuple[object, ...]
) -> None:
    """Their node follows from the counts, and the coordinator's host from the job around them."""
    facts = detect(env, hostname)
    task = facts.task

    assert task is not None
    numbers = (task.rank, task.world_size, task.local_rank, task.local_world_size)
    assert (facts.system, facts.nnodes, facts.node_rank, numbers, facts.coordinator) == expected
    assert "meshrun" in facts.one_a_node


def test_prrte_does_not_say_how_many() -> None:
    """Only that there are other processes."""
    facts = detect(PRRTE)

    assert (facts.system, facts.nnodes, facts.node_rank) == ("PRRTE", None, 1)
    assert (facts.is_one_of_several, facts.coordinator) == (True, ("vm",))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (LSF, ("LSF", "1234.0", ("n1", "n2"), "blaunch")),
        (PBS, ("PBS", "5.server", ("n1.site", "n2.site"), "ssh")),
        (GRIDENGINE, ("Grid Engine", "7.undefined", ("n1", "n2"), "qrsh")),
    ],
    ids=["LSF", "PBS", "Grid Engine"],
)
def test_a_script_knows_the_hosts_of_its_job(
    env: dict[str, str], expected: tuple[object, ...]
) -> None:
    """Each host once, and which one it is on; it is not a task."""
    facts = detect(env, "n2")

    assert (facts.system, facts.job_id, facts.hosts, facts.starter) == expected
    assert (facts.nnodes, facts.node_rank, facts.task) == (2, 1, None)
    assert facts.shell is not None


@pytest.mark.parametrize("env", [RAY_WORKER, RAY_JOB], ids=["worker", "job"])
def test_a_process_of_ray_knows_no_nodes(env: dict[str, str]) -> None:
    """Ray sets no nodes. It is inside the system that started the cluster, except SkyPilot."""
    facts, in_a_step = detect(env), detect({**env, **STEP_OF_DAEMON})

    assert (facts.system, facts.nnodes, facts.task, facts.coordinator) == ("Ray", None, None, ())
    assert "meshrun --submit ray" in (facts.shell or "")
    assert (in_a_step.system, len(in_a_step.notes)) == ("Ray", 1)
    assert detect({**env, **SKY}).system == "SkyPilot"


def test_a_list_of_hosts_that_was_removed() -> None:
    """As in a shell that outlived its job: a note says why no host is known."""
    facts = detect({**PBS, "PBS_NODEFILE": "/gone"})

    assert (facts.hosts, facts.nnodes) == ((), None)
    assert facts.notes == ("/gone cannot be read, or names no host",)


def test_the_variables_that_were_read() -> None:
    """With their values, and without any other variables."""
    facts = detect({**DSTACK, "HOME": "/root"})

    assert dict(facts.variables) == {
        name: value for name, value in DSTACK.items() if "GPUS" not in name
    }


@pytest.mark.parametrize(
    ("env", "hostname", "names"),
    [
        (MPI, "x", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
        (HYDRA, "x", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
        (MVAPICH, "x", ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"]),
        (PALS, "x", ["PALS_RANKID", "PALS_NODEID", "PALS_APID", "PALS_LOCAL_RANKID", "PMI_SIZE"]),
        (FLUX, "x", ["FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_TASK_RANK"]),
        ({name: value for name, value in JSRUN.items() if "OMPI" not in name}, "n2",
         ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"]),
        (SAGEMAKER, "x", ["SM_HOSTS", "SM_CURRENT_HOST"]),
        (AWS_BATCH, "x", ["AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES",
                          "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]),
        (AZURE_ML, "x", ["NODE_RANK", "MASTER_ADDR"]),
        (DSTACK, "x", ["DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"]),
        (TPU, "job-0-1", ["TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"]),
        (SLICES, "job-0-1", ["MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"]),
        (GROUP, "x", ["LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE"]),
        (SKY, "x", ["SKYPILOT_NODE_RANK"]),
    ],
)  # fmt: skip
def test_half_of_the_variables_is_an_error(
    env: dict[str, str], hostname: str, names: list[str]
) -> None:
    """As when a container receives only some: an error names the missing one."""
    for name in names:
        with pytest.raises(UsageError, match=rf"set without .*{name}"):
            detect_cluster(Surroundings({**env, name: ""}, hostname=hostname, read=read))


def test_pmi_alone_is_not_enough() -> None:
    """It shows that there are several processes, but not where; one of them reports the error."""
    with pytest.raises(UsageError, match="PMI_RANK 1 of PMI_SIZE 4") as error:
        detect_cluster(Surroundings({"PMI_RANK": "1", "PMI_SIZE": "4"}, hostname="here"))

    assert error.value.is_reported_elsewhere
    assert detect_cluster(Surroundings({"PMI_RANK": "0", "PMI_SIZE": "1"}, hostname="here")) is None


@pytest.mark.parametrize(
    "env",
    [
        {"MASTER_ADDR": "h", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"},
        {"NODE_RANK": "1", "MASTER_ADDR": "h"},
        {"JOB_ID": "7", "NHOSTS": "2", "HOSTS": "a b"},
        {"PMIX_RANK": "1"},
        {"CLUSTER_SPEC": '{"cluster": {"ps": []}}'},
    ],
)
def test_names_that_many_use_are_not_enough(env: dict[str, str]) -> None:
    """A second variable has to show which system set them."""
    assert detect_cluster(Surroundings(env, hostname="here", read=read)) is None


def test_one_process_inside_several_is_reported() -> None:
    """As in `srun -N3 mpirun -n 1`, or with variables of an earlier mpirun in srun's shell."""
    one = {name: value for name, value in MPI.items() if name.startswith("OMPI_COMM_WORLD")}
    alone = {**one, **dict.fromkeys((name for name in one if "RANK" in name), "0"),
             "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # fmt: skip
    with pytest.raises(
        UsageError, match=r"Open MPI started 1 process .*, but Slurm around it started 4"
    ):
        detect_cluster(Surroundings({**STEP, **alone}, hostname="here"))

    assert detect({**SALLOC, **alone}).system == "Open MPI"


def test_slurm_counts_in_pods_and_mpirun_in_slurm() -> None:
    """The innermost system counts; notes name the others."""
    in_pods = detect({**STEP, "JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "x"})
    in_slurm = detect({**HYDRA, **STEP})

    assert (in_pods.system, len(in_pods.notes)) == ("Slurm", 1)
    assert "Kubernetes Indexed Job" in in_pods.notes[0]
    assert (in_slurm.system, in_slurm.notes[0][:6]) == ("MPICH", "Slurm:")


def test_a_rank_in_a_pod_is_not_a_pod_of_a_pytorch_job() -> None:
    """LOCAL_RANK is a launcher's, and a MASTER_ADDR with another name belongs to another job."""
    in_rank = {**PYTORCH_JOB, "LOCAL_RANK": "0"}
    assert detect_cluster(Surroundings(in_rank, hostname="mnist-worker-1")) is None
    assert detect_cluster(Surroundings(PYTORCH_JOB, hostname="other-worker-1")) is None
    assert detect_cluster(Surroundings(PYTORCH_JOB, hostname="laptop")) is None


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
        (HYDRA, "PMI_RANK", "2"),
        (HYDRA, "MPI_LOCALNRANKS", "3"),
        (MVAPICH, "MV2_COMM_WORLD_LOCAL_RANK", "2"),
        (PALS, "PALS_RANKID", "2"),
        (FLUX, "FLUX_TASK_RANK", "2"),
        (FLUX, "FLUX_JOB_NNODES", "3"),
        (SAGEMAKER, "SM_HOSTS", "algo-1"),
        (SAGEMAKER, "SM_CURRENT_HOST", "algo-3"),
        (AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX", "3"),
        (AZURE_ML, "NODE_RANK", "2"),
        (VERTEX, "CLUSTER_SPEC", '{"cluster": "workerpool0"}'),
        (DSTACK, "DSTACK_NODES_IPS", "10.0.0.4"),
        (TPU, "TPU_WORKER_ID", "2"),
        (LSF, "LSB_MCPU_HOSTS", "n1 8 n2"),
        (PBS, "PBS_NODENUM", "x"),
    ],
)
def test_a_broken_variable_is_named(env: dict[str, str], name: str, value: str) -> None:
    """With its value."""
    with pytest.raises(UsageError, match=f"{name}.*`{re.escape(value)}`"):
        detect_cluster(Surroundings({**env, name: value}, hostname="here", read=read))


def test_half_a_slurm_step_is_reported() -> None:
    """As when a container receives only some of its variables."""
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS, SLURM_NODEID"):
        detect_cluster(Surroundings(env, hostname="here"))


REAL = [STEP, BATCH, SALLOC, MPI, SKY, TRAINER, PYTORCH_JOB, GROUP, HYDRA, INTEL, MPI_5, PRRTE,
        MVAPICH, PALS, FLUX, JSRUN, LSF, PBS, GRIDENGINE, SAGEMAKER, AWS_BATCH, AZURE_ML, AZURE_OLD,
        VERTEX, VOLCANO, DSTACK, DETERMINED, SLICES]  # fmt: skip
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
    """The result is consistent facts, None, or an error that names a variable."""
    env = {name: value for each in [*real, changed] for name, value in each.items()}
    try:
        facts = detect_cluster(Surroundings(env, hostname=hostname, read=read))
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
    """The same on every node, and outside the range of the kernel's ephemeral ports."""
    assert 20000 <= derive_port(job_id) < 30000
    assert derive_port("7.0") == derive_port("7.0") != derive_port("7.1")
