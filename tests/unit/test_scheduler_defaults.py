"""What the scheduler fills in for options that the user left out; and where the nodes meet."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from meshrun.cluster import ClusterFacts, Task
from meshrun.cluster.peer_exchange import Peer, format_peer, parse_peer, with_peers
from meshrun.errors import UsageError
from meshrun.plan.hostfile import Host
from meshrun.plan.rank_program import Program
from meshrun.plan.rendezvous_config import (
    RendezvousConfig,
    format_endpoint,
    plan_rendezvous,
)
from meshrun.plan.rendezvous_options import DEFAULT_PORT
from meshrun.plan.request import LaunchRequest, RemoteHosts
from meshrun.plan.scheduler_defaults import apply_cluster, note_few_cores
from meshrun.submit.srun_step import launch_on_nodes
from tests.plans import MACHINE, meeting_of, request_of

EIGHT = Task(rank=0, world_size=8, local_rank=0, local_world_size=8)
SLURM = ClusterFacts(
    system="Slurm", evidence="step 0 of job 7", job_id="7.0", nnodes=3, node_rank=1,
    hosts=("sl0", "sl1", "sl2"), coordinator=("sl0", "10.77.0.1"), port=23456,
    one_a_node="srun --ntasks-per-node=1 meshrun ...",
)  # fmt: skip
MPI = ClusterFacts(
    system="Open MPI", evidence="process 0 of 2", job_id="9", nnodes=2, node_rank=0,
    coordinator=("10.77.0.1",), port=20001, secret="of the job",
    notes=("Slurm: job 7, around Open MPI",),
    one_a_node="mpirun -npernode 1 --bind-to none meshrun ...",
)  # fmt: skip
INDEXED = ClusterFacts(
    system="Kubernetes Indexed Job", evidence="index 2", job_id="train", nnodes=None, node_rank=2,
    coordinator=("train-0.svc", "train-0"), port=25000,
)  # fmt: skip
SHELL = ClusterFacts(
    system="Slurm", evidence="job 3", job_id="3", nnodes=None, node_rank=None,
    notes=("SLURM_PROCID without SLURM_STEP_ID: a batch script, no task",),
    shell="srun --ntasks-per-node=1 meshrun ...",
)  # fmt: skip

SCRIPT = ClusterFacts(
    system="PBS", evidence="job 5 (PBS_JOBID)", job_id="5", nnodes=2, node_rank=0,
    hosts=("n1", "n2"), starter="qrsh", shell="meshrun --nnodes N ...", notes=("a script",),
    can_start=True,
)  # fmt: skip
HYDRA = ClusterFacts(
    system="MPICH", evidence="process 0 of 2", job_id=None, nnodes=2, node_rank=0,
    task=Task(rank=0, world_size=2, local_rank=0, local_world_size=1, per_node=(1, 1)),
)  # fmt: skip

REACH = request_of().access


def fitted(facts: ClusterFacts | None, *, nnodes: int | None = None, **asked: Any) -> LaunchRequest:
    return apply_cluster(request(nnodes, **asked), facts)


def request(nnodes: int | None = None, **asked: Any) -> LaunchRequest:
    program = Program(kind="script", target="x.py", args=())
    return request_of(program, nnodes=nnodes, rendezvous=meeting_of(**asked))


def test_everything_is_found_in_a_step_of_slurm() -> None:
    """The source of each value is kept for the dry run."""
    found = fitted(SLURM)

    assert found.nnodes == 3
    assert found.rendezvous == meeting_of(
        node_rank=1, run_id="7.0", master_addr="sl0", master_port=23456,
        coordinator=("sl0", "10.77.0.1"), hosts=("sl0", "sl1", "sl2"),
        notes=("Slurm, step 0 of job 7: node 1 of 3 nodes",),
    )  # fmt: skip
    assert found.sources == tuple(
        (name, value, "Slurm")
        for name, value in [
            ("--nnodes", "3"), ("--node-rank", "1"), ("--rdzv-id", "7.0"),
            ("--master-addr", "sl0"), ("--master-port", "23456"),
        ]
    )  # fmt: skip


def test_a_job_of_mpirun_has_a_secret() -> None:
    """The secret is not shown; the scheduler around mpirun is."""
    found = fitted(MPI).rendezvous

    assert found.secret == "of the job"
    assert "of the job" not in repr(found)
    assert found.notes[0].endswith("node 0 of 2 nodes; ignored: Slurm: job 7, around Open MPI")


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"node_rank": 2}, {"node_rank": 2}),
        ({"run_id": "mine"}, {"run_id": "mine"}),
        ({"endpoint": "h:1"}, {"endpoint": "h:1", "master_addr": None, "coordinator": ()}),
        ({"master_addr": "h"}, {"master_addr": "h", "master_port": None, "coordinator": ()}),
        ({"master_port": 5}, {"master_addr": "sl0", "master_port": 5}),
    ],
    ids=["node rank", "id", "endpoint", "address", "port"],
)
def test_what_the_user_says_takes_precedence(asked: dict[str, Any], kept: dict[str, Any]) -> None:
    """The rest is still filled in."""
    found = fitted(SLURM, **asked).rendezvous

    assert {name: getattr(found, name) for name in kept} == kept
    assert found.hosts == SLURM.hosts


def test_a_range_ends_with_the_nodes_of_the_step() -> None:
    """Tasks of a step start together, so none joins later; a single node is not elastic."""
    task = Task(rank=1, world_size=3, local_rank=0, local_world_size=1, per_node=(1, 1, 1))
    asked = {"nnodes": 8, "least_nodes": 1}
    found = fitted(replace(SLURM, task=task), **asked)
    pod = fitted(replace(INDEXED, nnodes=3), **asked)
    only = Task(rank=0, world_size=1, local_rank=0, local_world_size=1, per_node=(1,))
    alone = fitted(replace(SLURM, nnodes=1, node_rank=0, task=only), **asked)
    shell = apply_cluster(request(**asked), replace(SHELL, nnodes=3, can_start=True))

    assert (found.nnodes, found.rendezvous.least_nodes) == (3, 1)
    assert ("--rdzv-backend", "c10d", "Slurm") in found.sources
    assert found.rendezvous.backend == pod.rendezvous.backend == shell.rendezvous.backend == "c10d"
    assert fitted(SLURM, **asked, backend="etcd").rendezvous.backend == "etcd"
    assert found.rendezvous.master_addr == "sl0"
    assert pod.nnodes == 8
    assert (alone.nnodes, alone.rendezvous.least_nodes) == (1, None)
    assert plan_rendezvous(alone.rendezvous, 1) is None
    assert (shell.nnodes, shell.rendezvous.step_of) == (3, "3")
    with pytest.raises(UsageError, match="--nnodes 4:8, but Slurm allocated 3"):
        fitted(SLURM, **{**asked, "least_nodes": 4})


def test_fewer_nodes_than_there_are() -> None:
    """The first ones in the scheduler's order."""
    found = fitted(SLURM, nnodes=2)

    assert (found.nnodes, found.rendezvous.hosts) == (2, ("sl0", "sl1"))
    assert "--nnodes" not in [name for name, *_ in found.sources]


@pytest.mark.parametrize(
    "asked",
    [{"standalone": True}, {"nnodes": 1}],
    ids=["--standalone", "--nnodes 1"],
)
def test_one_node_is_one_node_if_it_was_asked_for(asked: dict[str, Any]) -> None:
    """Nothing is filled in, even with several launchers on the node."""
    several = replace(SLURM, task=EIGHT)

    assert fitted(several, **asked) == fitted(None, **asked)


def test_nothing_is_changed_without_a_scheduler() -> None:
    assert fitted(None, nnodes=4) == request(4)


@pytest.mark.parametrize(
    ("facts", "asked", "message", "hint"),
    [
        (SLURM, {"nnodes": 4}, "--nnodes 4, but Slurm .* 3",
         "remove --nnodes: it defaults to 3 here"),
        (replace(SLURM, node_rank=2), {"nnodes": 2},
         "--nnodes 2, but Slurm .* 2",
         "start meshrun on 2 nodes, or remove --nnodes"),
        (replace(SLURM, nnodes=1, node_rank=0, task=EIGHT), {},
         "Slurm started meshrun 8 times on this node", "srun --ntasks-per-node=1 meshrun ..."),
        (replace(MPI, task=replace(EIGHT, world_size=16)), {"nnodes": 2},
         "Open MPI started meshrun 16 times on 2 nodes",
         "mpirun -npernode 1 --bind-to none meshrun ..."),
        (replace(INDEXED, task=EIGHT), {}, "8 times, 8 of them", "start one meshrun per node"),
        (replace(SLURM, task=Task(rank=2, world_size=4, local_rank=0, local_world_size=1,
                                  per_node=(2, 1, 1))), {},
         r"Slurm started meshrun 4 times on 3 nodes \(2, 1, 1\)",
         "srun --ntasks-per-node=1 meshrun ..."),
        (SHELL, {"nnodes": 2}, "--nnodes 2 in a Slurm shell",
         "start one launcher per node: srun --ntasks-per-node=1 meshrun ..."),
        (replace(HYDRA, variables=(("PMI_RANK", "0"), ("PMI_SIZE", "2"))), {},
         "MPICH does not tell processes the address of node 0",
         "pass --rdzv-endpoint HOST:PORT, with node 0's name and a free port; or unset"
         " PMI_RANK, PMI_SIZE if they are left over from another job"),
        (HYDRA, {}, "MPICH does not tell processes the address of node 0",
         "pass --rdzv-endpoint HOST:PORT, with node 0's name and a free port"),
        (replace(HYDRA, task=None, nnodes=None, is_one_of_several=True), {},
         "MPICH started several processes",
         "pass --nnodes N, with one process on each node: start one meshrun per node; or"
         " --nnodes 1 for a launch in each process"),
        (replace(HYDRA, nnodes=None), {}, "MPICH started meshrun 2 times, 1 of them on this node",
         "start one meshrun per node"),
        (replace(SCRIPT, hosts=(), nnodes=None), {"nnodes": 2}, r"in a PBS shell, .* \(a script\)",
         "name the hosts with --hosts, or start one launcher per node"),
    ],
    ids=["more than there are", "a node too many", "a task per GPU", "a process per GPU",
         "another system", "two on another node", "a shell", "left-over variables", "no address",
         "no number",
         "other counts", "no list of hosts"],
)  # fmt: skip
def test_an_impossible_request_is_an_error(
    facts: ClusterFacts, asked: dict[str, Any], message: str, hint: str
) -> None:
    """The error has the numbers, and the hint says what to type."""
    with pytest.raises(UsageError, match=message) as error:
        fitted(facts, **asked)

    assert error.value.hint == hint


@pytest.mark.parametrize("rank", [0, 3])
def test_what_holds_for_all_tasks_is_reported_by_the_first(rank: int) -> None:
    """`srun -n8` shows one error and not eight."""
    task = Task(rank=rank, world_size=8, local_rank=rank, local_world_size=8, per_node=(8,))
    with pytest.raises(UsageError, match="8 times on this node") as error:
        fitted(replace(SLURM, nnodes=1, task=task))

    assert error.value.is_reported_elsewhere == (rank > 0)


def test_a_shell_in_an_allocation_launches_on_one_node() -> None:
    """Without a note if the allocation has one node, with a note if it has more."""
    assert fitted(SHELL) == fitted(None)
    noted = fitted(replace(SHELL, nnodes=2))

    assert noted.nnodes is None
    assert noted.rendezvous.notes[0].endswith(
        "one of 2 nodes; to use all: srun --ntasks-per-node=1 meshrun ..."
    )
    with_srun = apply_cluster(request(), replace(SHELL, nnodes=2, can_start=True))
    assert with_srun.rendezvous.notes[0].endswith(": --nnodes 2")


def test_a_script_launches_on_the_hosts_of_its_job() -> None:
    """With the scheduler's own starter, unless the user chooses another."""
    asked = replace(request(2), access=replace(REACH, export=("WANDB_*",)))
    by_qrsh = apply_cluster(asked, SCRIPT)
    by_ssh = apply_cluster(replace(asked, access=replace(REACH, starter="ssh")), SCRIPT).remote

    hosts = (Host("n1"), Host("n2"))
    by = replace(REACH, starter="qrsh", export=("WANDB_*",))
    assert by_qrsh.remote == RemoteHosts(hosts=hosts, access=by)
    assert by_ssh == RemoteHosts(hosts=hosts, access=replace(REACH, starter="ssh"))
    assert by_qrsh.rendezvous.notes[0].endswith("starting a launcher on each of 2 hosts with qrsh")
    alone = apply_cluster(request(), SCRIPT)
    assert alone.remote is None
    assert alone.rendezvous.notes[0].endswith("launching on one of 2 nodes; to use all: --nnodes 2")


@pytest.mark.parametrize(
    ("facts", "nnodes", "message"),
    [
        (SCRIPT, 3, r"--nnodes 3, but PBS allocated 2 .*: n1, n2"),
        (replace(SCRIPT, node_rank=1), 2, "--nnodes 2 on host 1 of PBS's 2, .* the first, n1"),
        (replace(SCRIPT, hosts=("n1", "-x")), 2, "PBS lists `-x`, which is not a host"),
        (replace(SCRIPT, hosts=()), 2, "PBS shell, which starts nothing on other nodes"),
    ],
)
def test_a_script_cannot_launch(facts: ClusterFacts, nnodes: int, message: str) -> None:
    """On more hosts than the job has, from a host other than the first, or on what is no host."""
    with pytest.raises(UsageError, match=message):
        apply_cluster(request(nnodes), facts)


def test_a_first_node_without_an_address_listens() -> None:
    """At the port to which the others connect."""
    found = fitted(replace(SLURM, node_rank=0, coordinator=(), hosts=())).rendezvous

    assert (found.node_rank, found.master_addr, found.master_port) == (0, None, 23456)


def peer(host: str, *addresses: str, secret: str = "") -> Peer:
    return Peer(machine=f"boot/{host}", host=host, addresses=addresses, secret=secret)


def test_what_processes_exchange_gives_the_nodes() -> None:
    """It gives the nodes, their processes, and node 0's address on a shared network."""
    peers = [
        peer("a", "172.17.0.1/16", "192.168.0.4/24", "10.0.0.4/24", secret="of rank 0"),
        peer("b", "172.17.0.1/16", "10.0.0.5/24"),
        peer("b", "172.17.0.1/16", "10.0.0.5/24"),
    ]
    assert [parse_peer(format_peer(each)) for each in peers] == peers
    task = Task(rank=2, world_size=3, local_rank=1, local_world_size=2)
    found = with_peers(replace(HYDRA, task=task, nnodes=None, node_rank=None), "kvs.0", peers)

    assert (found.nnodes, found.node_rank, found.hosts) == (2, 1, ("a", "b"))
    assert found.coordinator == ("10.0.0.4", "192.168.0.4", "a")
    assert (found.job_id, found.secret) == ("kvs.0", "of rank 0")
    assert found.task == Task(
        rank=2, world_size=3, local_rank=1, local_world_size=2, per_node=(1, 2)
    )
    with pytest.raises(UsageError, match=r"3 times on 2 nodes \(1, 2\)"):
        fitted(found)


@pytest.mark.parametrize("asked", [{"endpoint": "h:1"}, {"master_addr": "h"}, {"node_rank": 0}])
def test_a_shell_that_says_where_may_launch_on_several_nodes(asked: dict[str, Any]) -> None:
    """The user starts the other launchers by hand."""
    assert fitted(SHELL, nnodes=2, **asked) == request(2, **asked)


def test_an_indexed_job_needs_the_number_of_nodes() -> None:
    """Kubernetes does not give it: without --nnodes, this is one node, and a note says so."""
    alone, several = fitted(INDEXED), fitted(INDEXED, nnodes=4)

    assert alone.nnodes is None
    assert alone.rendezvous.notes == (
        "Kubernetes Indexed Job, index 2: this is node 2; the number of nodes is unknown, so"
        " launching on one; use --nnodes N for more",
    )
    assert several.rendezvous.notes == ("Kubernetes Indexed Job, index 2: node 2 of 4 nodes",)
    assert (several.rendezvous.node_rank, several.rendezvous.master_addr) == (2, "train-0.svc")


def test_a_scheduler_with_one_node_says_nothing() -> None:
    """There are no other nodes to meet."""
    found = fitted(replace(SLURM, nnodes=1, node_rank=0, hosts=("sl0",)))

    assert found == request()


# ---- where the nodes meet -----------------------------------------------------------------------


def planned(nnodes: int = 2, **asked: Any) -> RendezvousConfig | None:
    return plan_rendezvous(meeting_of(**asked), nnodes)


@pytest.mark.parametrize(
    "asked", [{"nnodes": 1}, {"standalone": True}, {"nnodes": 1, "endpoint": "h:1"}]
)
def test_one_node_needs_no_rendezvous(asked: dict[str, Any]) -> None:
    """Not even with an endpoint."""
    assert planned(**asked) is None


def test_a_range_of_nodes_meets_even_for_one() -> None:
    """Others may join later, but not with the static back end, whose number is fixed."""
    found = planned(1, least_nodes=1, backend="c10d", endpoint="h")

    assert found is not None
    assert (found.nnodes, found.least_nodes) == (1, 1)
    with pytest.raises(UsageError, match=r"--nnodes 2:4 .* static") as error:
        planned(4, least_nodes=2)
    assert error.value.hint == "use --rdzv-backend c10d, or --nnodes 4"


@pytest.mark.parametrize(
    ("asked", "host", "port"),
    [
        ({}, None, None),
        ({"endpoint": "h:1"}, "h", 1),
        ({"endpoint": "h"}, "h", DEFAULT_PORT),
        ({"endpoint": "h", "backend": "c10d"}, "h", 29400),
        ({"endpoint": "h", "backend": "etcd-v2"}, "h", 2379),
        ({"endpoint": "h", "backend": "mine"}, "h", DEFAULT_PORT),
        ({"endpoint": "[::1]:7"}, "::1", 7),
        ({"endpoint": "::1"}, "::1", DEFAULT_PORT),
        ({"endpoint": "fd91::1:23653"}, "fd91::1", 23653),
        ({"endpoint": "fd91::1"}, "fd91::1", DEFAULT_PORT),
        ({"endpoint": "1:2:3:4:5:6:7:8:9"}, "1:2:3:4:5:6:7:8", 9),
        ({"endpoint": "1:2:3:4:5:6:7:8"}, "1:2:3:4:5:6:7:8", DEFAULT_PORT),
        ({"endpoint": "fe80::a%eth0:2950"}, "fe80::a%eth0", 2950),
        ({"endpoint": "fe80::a%eth0.1"}, "fe80::a%eth0.1", DEFAULT_PORT),
        ({"endpoint": "[fe80::a%eth0]:2950"}, "fe80::a%eth0", 2950),
        ({"endpoint": "[fe80::a%eth0]"}, "fe80::a%eth0", DEFAULT_PORT),
        ({"master_addr": "h", "master_port": 5}, "h", 5),
        ({"master_addr": "[fd00::1]"}, "fd00::1", DEFAULT_PORT),
        ({"master_addr": "h", "master_port": 5, "endpoint": "g:6"}, "g", 6),
        ({"master_port": 5}, None, 5),
    ],
)
def test_the_options_say_where_the_nodes_meet(
    asked: dict[str, Any], host: str | None, port: int | None
) -> None:
    """--rdzv-endpoint takes precedence over --master-addr; the default port is the back end's."""
    found = planned(**asked)

    assert found is not None
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("text", ["fd91::1:2950", "fe80::1:1"])
def test_an_endpoint_that_can_be_read_in_two_ways(text: str) -> None:
    """The hint shows both, and neither is guessed."""
    with pytest.raises(UsageError, match="is ambiguous") as error:
        planned(endpoint=text)
    assert (
        error.value.hint
        == f"write [{text.rpartition(':')[0]}]:{text.rpartition(':')[2]} or [{text}]"
    )


def test_how_long_nodes_may_take() -> None:
    """Ten minutes, torchrun's join_timeout, or its timeout."""
    conf = [(), (("timeout", "30"),), (("timeout", "30"), ("join_timeout", "60"))]
    found = [planned(conf=each) for each in conf]

    assert [each.timeout_s for each in found if each] == [600.0, 30.0, 60.0]
    with pytest.raises(UsageError, match="--rdzv-conf join_timeout"):
        planned(conf=(("join_timeout", "long"),))


def test_the_host_of_c10d_is_told_in_torchs_words() -> None:
    """``y`` as well as ``true``; a misspelled word is an error."""
    found = [planned(backend="c10d", conf=(("is_host", word),)) for word in ("y", "False")]

    assert [each.is_first for each in found if each] == [True, False]
    with pytest.raises(UsageError, match="is_host must be true or false"):
        planned(backend="c10d", conf=(("is_host", "ture"),))


def test_a_job_with_fewer_nodes_starts_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before srun's; a dry run may plan for a larger job."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    asked = replace(request(), nnodes=3)

    assert apply_cluster(asked, replace(SHELL, nnodes=2, can_start=True)).nnodes == 3
    with pytest.raises(UsageError, match="--nnodes 3, but Slurm allocated 2"):
        launch_on_nodes(asked, [], job="7")


def test_an_endpoint_is_formatted_as_it_is_parsed() -> None:
    """With IPv6 addresses in brackets."""
    assert [format_endpoint(host, 1) for host in ("h", "10.0.0.1", "fd00::1", "[fd00::1]")] == [
        "h:1", "10.0.0.1:1", "[fd00::1]:1", "[fd00::1]:1",
    ]  # fmt: skip


def test_the_secret_is_not_shown() -> None:
    """A traceback may show the configuration of the rendezvous, and the facts it is made from."""
    facts = replace(SLURM, secret="hidden", variables=(("KEY", "hidden"),))

    assert "hidden" not in repr((planned(secret="hidden"), facts))


@pytest.mark.parametrize(
    ("facts", "workers", "bound", "notes"),
    [
        (SLURM, 2, 1, ("Slurm binds 2 workers to 1 of 4 cores: widen the affinity mask",)),
        (replace(SLURM, more_cores="srun --cpus-per-task={workers}"), 8, 3,
         ("Slurm binds 8 workers to 3 of 4 cores: srun --cpus-per-task=8",)),
        (SLURM, 8, 4, ()),
        (SLURM, 2, 2, ()),
        (SHELL, 2, 1, ()),
        (None, 2, 1, ()),
    ],
)  # fmt: skip
def test_workers_that_share_fewer_cores_than_there_are(
    facts: ClusterFacts | None, workers: int, bound: int, notes: tuple[str, ...]
) -> None:
    """The note says how to get more of them from the scheduler."""
    assert note_few_cores(facts, replace(MACHINE, bound_cores=bound, cores=4), workers) == notes


def test_a_scheduler_that_repeats_sigterm() -> None:
    """Also if the launch is on one node."""
    for asked in ({}, {"nnodes": 1}, {"standalone": True}):
        assert fitted(replace(SLURM, repeats_sigterm=True), **asked).sigterm_repeats
        assert not fitted(SLURM, **asked).sigterm_repeats
