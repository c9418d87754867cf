"""Which CPUs each rank is bound to, on invented machines."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.app import plan
from meshrun.errors import HostError, UsageError
from meshrun.host.machine import Cpu, Topology, parse_cpus
from meshrun.plan.choices import NUMA_BINDINGS, NumaBinding
from meshrun.plan.hardware import choose_cpus
from meshrun.wording import number_ranges
from tests.machines import BIG, Machine, machines
from tests.plans import plan_of


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Return CPUs and accelerators on arbitrary nodes."""
    few = st.integers(0, 3)
    indexes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    return Topology(
        cpus=tuple(
            Cpu(index=index, node=draw(few), socket=draw(few), core=draw(few), cache=draw(few))
            for index in indexes
        ),
        accelerator_nodes=tuple(draw(st.lists(st.none() | few, max_size=5))),
    )


# ---- the CPUs of each mode ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "local_rank", "cpus"),
    [
        ("node", 0, "9-17,45-53"),
        ("node", 7, "18-26,54-62"),
        ("socket", 0, "0-17,36-53"),
        ("socket", 4, "18-35,54-71"),
        ("exclusive", 0, "9-13,45-49"),
        ("exclusive", 1, "14-17,50-53"),
        ("core-complex", 0, "9-11,45-47"),
        ("core-complex", 1, "12-14,48-50"),
    ],
)
def test_each_mode_chooses_these_cpus(
    mode: NumaBinding, local_rank: int, cpus: str, tmp_path: Path
) -> None:
    """Two sockets of two nodes of three caches each, and two accelerators per node."""
    BIG.write(tmp_path)

    bound = choose_cpus(mode, BIG.read(tmp_path), local_rank=local_rank, nproc=8)

    assert number_ranges(bound) == cpus


def test_a_node_belongs_to_the_socket_of_its_lowest_cpu() -> None:
    """If it spans sockets, as some virtual machines report."""
    places = [(0, 0), (0, 1), (1, 1)]
    topology = Topology(
        cpus=tuple(
            Cpu(index=index, node=node, socket=socket, core=index, cache=0)
            for index, (node, socket) in enumerate(places)
        ),
        accelerator_nodes=(0, 1),
    )

    bound = [choose_cpus("socket", topology, local_rank=rank, nproc=2) for rank in range(2)]

    assert bound == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("mode", "nproc", "cpus"),
    [
        ("node", 1, ["0-3"]),
        ("node", 2, ["0-3", "4-7"]),
        ("node", 3, ["0-3", "0-3", "4-7"]),
        ("exclusive", 3, ["0-1", "2-3", "4-7"]),
        ("exclusive", 6, ["0-1", "2", "3", "4-5", "6", "7"]),
        ("core-complex", 6, ["0-1", "2-3", "0-1", "4-5", "6-7", "4-5"]),
    ],
)
def test_ranks_without_an_accelerator_are_spread(
    mode: NumaBinding, nproc: int, cpus: list[str], tmp_path: Path
) -> None:
    """Over the nodes in order, and over the parts into which a mode divides a node."""
    machine = Machine(sockets=2, caches_per_node=2, cores_per_cache=2)
    machine.write(tmp_path)
    topology = machine.read(tmp_path)

    bound = [choose_cpus(mode, topology, local_rank=rank, nproc=nproc) for rank in range(nproc)]

    assert [number_ranges(each) for each in bound] == cpus


def test_ranks_without_an_accelerator_share_the_node_of_those_with_one(tmp_path: Path) -> None:
    """Each rank still has cores of its own."""
    machine = Machine(sockets=2, gpu_nodes=(1, 1))
    machine.write(tmp_path)
    topology = machine.read(tmp_path)

    bound = [choose_cpus("exclusive", topology, local_rank=rank, nproc=4) for rank in range(4)]

    assert [number_ranges(each) for each in bound] == ["4", "5", "6", "7"]


@given(topology=topologies(), nproc=st.integers(1, 12), mode=st.sampled_from(NUMA_BINDINGS))
def test_bound_cpus_are_allowed_and_near(topology: Topology, nproc: int, mode: NumaBinding) -> None:
    """On any machine, each rank gets CPUs of its accelerator's node or socket, in order."""
    for rank in range(nproc):
        try:
            bound = choose_cpus(mode, topology, local_rank=rank, nproc=nproc)
        except UsageError as error:
            assert error.hint
            continue
        assert bound
        assert list(bound) == sorted(set(bound))
        assert set(bound) <= {cpu.index for cpu in topology.cpus}
        node = dict(enumerate(topology.accelerator_nodes)).get(rank)
        if node is not None and mode != "socket":
            assert {cpu.node for cpu in topology.cpus if cpu.index in bound} == {node}


@given(machine=machines(), nproc=st.integers(1, 30))
def test_exclusive_ranks_share_no_core(machine: Machine, nproc: int) -> None:
    """Ranks of a node differ by at most one core."""
    cpus = tuple(
        Cpu(
            index=cpu,
            node=cpu % machine.cores // machine.cores_per_node,
            socket=0,
            core=cpu % machine.cores,
            cache=0,
        )
        for cpu in machine.allowed
    )
    topology = Topology(cpus=cpus, accelerator_nodes=machine.gpu_nodes)
    try:
        bound = [
            choose_cpus("exclusive", topology, local_rank=rank, nproc=nproc)
            for rank in range(nproc)
        ]
    except UsageError:
        return
    core_of = {cpu.index: cpu.core for cpu in cpus}
    node_of = {cpu.index: cpu.node for cpu in cpus}
    cores = [{core_of[cpu] for cpu in each} for each in bound]
    assert sum(len(each) for each in cores) == len(set().union(*cores))
    for node in topology.nodes:
        counts = [
            len(each) for each, ids in zip(cores, bound, strict=True) if node_of[ids[0]] == node
        ]
        assert max(counts, default=0) - min(counts, default=0) <= 1


@given(topology=topologies(), nproc=st.integers(1, 30))
def test_spread_is_even_and_contiguous(topology: Topology, nproc: int) -> None:
    """Ranks of one node are neighbors, and nodes differ by one rank at most."""
    topology = Topology(cpus=topology.cpus)
    node_of = {cpu.index: cpu.node for cpu in topology.cpus}

    bound = [choose_cpus("node", topology, local_rank=rank, nproc=nproc) for rank in range(nproc)]

    homes = [node_of[each[0]] for each in bound]
    assert homes == sorted(homes)
    counts = [homes.count(node) for node in topology.nodes]
    assert max(counts) - min(counts) <= 1


# ---- errors ------------------------------------------------------------------------------------


def test_an_accelerator_on_a_node_without_usable_cpus_is_an_error() -> None:
    """The error names the usable nodes."""
    topology = Topology(
        cpus=tuple(Cpu(index=i, node=i % 2, socket=0, core=i, cache=0) for i in range(4)),
        accelerator_nodes=(0, 3),
    )

    with pytest.raises(UsageError) as caught:
        choose_cpus("node", topology, local_rank=1, nproc=2)
    assert caught.value.message == (
        "--numa-binding node binds local rank 1 to NUMA node 3, where accelerator 1 is, but"
        " this process may only use 4 CPUs of NUMA nodes 0-1"
    )
    assert caught.value.hint == "widen the affinity mask or cpuset, or remove --numa-binding"


def test_fewer_cores_than_workers_is_an_error() -> None:
    """Hyperthreads do not count as cores."""
    topology = Topology(
        cpus=tuple(Cpu(index=i, node=0, socket=0, core=i // 2, cache=0) for i in range(4))
    )

    with pytest.raises(UsageError, match="NUMA node 0 has 2 for 3 workers") as caught:
        choose_cpus("exclusive", topology, local_rank=0, nproc=3)
    assert caught.value.hint == "use --numa-binding node to share the cores of a NUMA node"


def test_a_machine_without_a_cpu_topology_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot read the CPU topology"):
        choose_cpus("node", Topology(cpus=()), local_rank=0, nproc=1)


# ---- lists of CPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((0, 2, 3), "0,2-3"), ((9, 10), "9-10")],
)
def test_lists_of_cpus(cpus: tuple[int, ...], text: str) -> None:
    """As the kernel writes them."""
    assert number_ranges(cpus) == text
    assert parse_cpus(text + "\n") == cpus


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cpus_is_parsed_as_it_was_written(cpus: frozenset[int]) -> None:
    """In ascending order."""
    assert parse_cpus(number_ranges(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "1-", "1-2-3", "0x1"])
def test_text_that_is_not_a_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid"):
        parse_cpus(text)


def test_a_machine_that_refuses_binding_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a seccomp profile; a dry run does not ask."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    request = plan_of(numa_binding="node").request

    plan(request, check_host=False)
    with pytest.raises(HostError, match=r"sched_setaffinity.*\nhint: see the seccomp"):
        plan(request)
