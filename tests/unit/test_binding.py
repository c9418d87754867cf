"""Which CPUs each rank is bound to, on machines that are invented here."""

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshrun.binding import (
    BINDING_MODES,
    BindingMode,
    Cpu,
    Topology,
    bind_cpus,
    format_cpus,
    parse_cpus,
)
from meshrun.errors import UsageError
from meshrun.host.topology import read_topology, visible_pci_addresses

# ---- invented machines -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine whose hyperthread siblings are ``cores`` apart, as on x86."""

    sockets: int = 1
    nodes_per_socket: int = 1
    caches_per_node: int = 1
    cores_per_cache: int = 4
    threads: int = 1
    gpu_nodes: tuple[int, ...] = ()
    hidden: frozenset[int] = frozenset()
    """CPUs that this process may not use."""

    @property
    def nodes(self) -> int:
        return self.sockets * self.nodes_per_socket

    @property
    def cores_per_node(self) -> int:
        return self.caches_per_node * self.cores_per_cache

    @property
    def cores(self) -> int:
        return self.nodes * self.cores_per_node

    @property
    def allowed(self) -> set[int]:
        return set(range(self.cores * self.threads)) - self.hidden

    @property
    def pci_addresses(self) -> tuple[str, ...]:
        return tuple(f"0000:{0x1A + gpu:02x}:00.0" for gpu in range(len(self.gpu_nodes)))

    def with_siblings(self, cores: range) -> str:
        return ",".join(
            f"{cores[0] + thread * self.cores}-{cores[-1] + thread * self.cores}"
            for thread in range(self.threads)
        )

    def write(self, sysfs: Path) -> None:
        """Write what the kernel would say of it."""
        for node in range(self.nodes):
            first = node * self.cores_per_node
            cpus = self.with_siblings(range(first, first + self.cores_per_node))
            put(sysfs / f"devices/system/node/node{node}/cpulist", cpus)
        put(sysfs / "devices/system/node/possible", f"0-{self.nodes - 1}")
        for cpu in range(self.cores * self.threads):
            folder = sysfs / f"devices/system/cpu/cpu{cpu}"
            core = cpu % self.cores
            socket = core // self.cores_per_node // self.nodes_per_socket
            siblings = self.with_siblings(range(core, core + 1))
            cache = core // self.cores_per_cache * self.cores_per_cache
            sharers = self.with_siblings(range(cache, cache + self.cores_per_cache))
            put(folder / "topology/physical_package_id", str(socket))
            put(folder / "topology/thread_siblings_list", siblings)
            caches = [("Unified", 3, sharers), ("Data", 1, siblings), ("Instruction", 4, siblings)]
            for index, (kind, level, shared) in enumerate(caches):
                put(folder / f"cache/index{index}/type", kind)
                put(folder / f"cache/index{index}/level", str(level))
                put(folder / f"cache/index{index}/shared_cpu_list", shared)
        for address, node in zip(self.pci_addresses, self.gpu_nodes, strict=True):
            put(sysfs / f"bus/pci/devices/{address}/numa_node", str(node))

    def read(self, sysfs: Path) -> Topology:
        return read_topology(sysfs, self.allowed, self.pci_addresses)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


BIG = Machine(
    sockets=2,
    nodes_per_socket=2,
    caches_per_node=3,
    cores_per_cache=3,
    threads=2,
    gpu_nodes=(1, 1, 0, 0, 3, 3, 2, 2),
)
"""72 CPUs; node 1 has cores 9 to 17 with siblings 45 to 53, in three caches."""

MACHINES = {
    "one of everything": Machine(cores_per_cache=1, gpu_nodes=(0,)),
    "laptop": Machine(gpu_nodes=(-1,), threads=2),
    "big": BIG,
    "gpus on one node": Machine(sockets=2, caches_per_node=2, gpu_nodes=(1, 1, 1)),
    "gpus interleaved": Machine(sockets=2, cores_per_cache=7, threads=2, gpu_nodes=(1, 0, 1, 0, 1)),
    "first cache cut": Machine(
        caches_per_node=3, threads=2, gpu_nodes=(0, 0, 0, 0), hidden=frozenset({0, 1, 12})
    ),
    "node cut to siblings": Machine(
        nodes_per_socket=2, threads=2, gpu_nodes=(0, 1), hidden=frozenset(range(3))
    ),
}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    size = st.integers(1, 3)
    sockets, nodes_per_socket = draw(size), draw(size)
    node = st.integers(0, sockets * nodes_per_socket - 1)
    machine = Machine(
        sockets=sockets,
        nodes_per_socket=nodes_per_socket,
        caches_per_node=draw(size),
        cores_per_cache=draw(size),
        threads=draw(st.integers(1, 2)),
        gpu_nodes=tuple(draw(st.lists(node, max_size=6))),
    )
    hidden = draw(st.frozensets(st.sampled_from(sorted(machine.allowed)), max_size=8))
    assume(machine.allowed - hidden)
    return Machine(**{**vars(machine), "hidden": hidden})


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """CPUs and accelerators anywhere at all."""
    few = st.integers(0, 3)
    indexes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    return Topology(
        cpus=tuple(
            Cpu(index=index, node=draw(few), socket=draw(few), core=draw(few), cache=draw(few))
            for index in indexes
        ),
        accelerator_nodes=tuple(draw(st.lists(st.none() | few, max_size=5))),
    )


# ---- the same choice as torch ------------------------------------------------------------------


def choices_of_torch(
    machine: Machine, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[BindingMode, int, set[int] | None]]:
    """Yield what torch binds each rank to, ``None`` where it refuses, on a described machine."""
    binding: Any = pytest.importorskip("torch.numa.binding")

    def moved(path: str) -> str:
        assert path.startswith("/sys/")
        return str(sysfs / path.removeprefix("/sys/"))

    gpus = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=int(address[5:7], 16), pci_device_id=0)
        for address in machine.pci_addresses
    ]
    fake_os = SimpleNamespace(
        path=os.path,
        listdir=lambda path: os.listdir(moved(path)),
        sched_getaffinity=lambda _: machine.allowed,
    )
    fake_cuda = SimpleNamespace(
        device_count=lambda: len(gpus), get_device_properties=gpus.__getitem__
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            binding, "open", lambda path: StringIO(Path(moved(path)).read_text()), raising=False
        )
        patch.setattr(binding, "os", fake_os)
        patch.setattr(binding, "torch", SimpleNamespace(cuda=fake_cuda))
        for mode in BINDING_MODES:
            options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
            for gpu in range(len(gpus)):
                try:
                    chosen = binding._get_logical_cpus_to_bind_to(
                        gpu_index=gpu, numa_options=options
                    )
                except (RuntimeError, ValueError, ZeroDivisionError):
                    chosen = None
                yield mode, gpu, chosen or None


def check_against_torch(machine: Machine, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    machine.write(sysfs)
    topology = machine.read(sysfs)
    compared = 0
    for mode, gpu, chosen in choices_of_torch(machine, sysfs, monkeypatch):
        gpus = len(machine.gpu_nodes)
        if chosen is not None:
            for nproc in {gpu + 1, gpus}:
                assert bind_cpus(mode, topology, local_rank=gpu, nproc=nproc) == tuple(
                    sorted(chosen)
                ), (mode, gpu, nproc)
            compared += 1
        elif mode != "socket":  # torch refuses if any node at all is out of bounds
            with pytest.raises(UsageError):
                bind_cpus(mode, topology, local_rank=gpu, nproc=gpus)
    return compared


@pytest.mark.parametrize("name", MACHINES)
def test_ranks_are_bound_as_torch_binds_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer ranks than accelerators too."""
    machine = MACHINES[name]

    compared = check_against_torch(machine, tmp_path, monkeypatch)

    assert compared == len(machine.gpu_nodes) * len(BINDING_MODES)


@settings(max_examples=30, deadline=None)
@given(machine=machines())
def test_ranks_of_any_machine_are_bound_as_torch_binds_them(machine: Machine) -> None:
    """And where torch refuses, so does meshrun."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        check_against_torch(machine, Path(folder), monkeypatch)


# ---- what each mode gives ----------------------------------------------------------------------


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
def test_modes(mode: BindingMode, local_rank: int, cpus: str, tmp_path: Path) -> None:
    """Two sockets of two nodes of three caches, and two accelerators a node."""
    BIG.write(tmp_path)

    bound = bind_cpus(mode, BIG.read(tmp_path), local_rank=local_rank, nproc=8)

    assert format_cpus(bound) == cpus


def test_a_node_lies_on_the_socket_of_its_lowest_cpu() -> None:
    """Where a node spans sockets, as some virtual machines claim."""
    places = [(0, 0), (0, 1), (1, 1)]
    topology = Topology(
        cpus=tuple(
            Cpu(index=index, node=node, socket=socket, core=index, cache=0)
            for index, (node, socket) in enumerate(places)
        ),
        accelerator_nodes=(0, 1),
    )

    bound = [bind_cpus("socket", topology, local_rank=rank, nproc=2) for rank in range(2)]

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
    mode: BindingMode, nproc: int, cpus: list[str], tmp_path: Path
) -> None:
    """Over the nodes in order, and over what each mode divides a node into."""
    machine = Machine(sockets=2, caches_per_node=2, cores_per_cache=2)
    machine.write(tmp_path)
    topology = machine.read(tmp_path)

    bound = [bind_cpus(mode, topology, local_rank=rank, nproc=nproc) for rank in range(nproc)]

    assert [format_cpus(each) for each in bound] == cpus


def test_ranks_beyond_the_accelerators_share_with_those_that_have_one(tmp_path: Path) -> None:
    """Each rank still has cores of its own."""
    machine = Machine(sockets=2, gpu_nodes=(1, 1))
    machine.write(tmp_path)
    topology = machine.read(tmp_path)

    bound = [bind_cpus("exclusive", topology, local_rank=rank, nproc=4) for rank in range(4)]

    assert [format_cpus(each) for each in bound] == ["4", "5", "6", "7"]


@given(topology=topologies(), nproc=st.integers(1, 12), mode=st.sampled_from(BINDING_MODES))
def test_bound_cpus_are_allowed_and_near(topology: Topology, nproc: int, mode: BindingMode) -> None:
    """Whatever the machine: some CPUs, in order, of the accelerator's node or socket."""
    for rank in range(nproc):
        try:
            bound = bind_cpus(mode, topology, local_rank=rank, nproc=nproc)
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
    """And nobody has more than one core above anybody else of the node."""
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
            bind_cpus("exclusive", topology, local_rank=rank, nproc=nproc) for rank in range(nproc)
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
    """Ranks of one node are neighbours, and nodes differ by one rank at most."""
    topology = Topology(cpus=topology.cpus)
    node_of = {cpu.index: cpu.node for cpu in topology.cpus}

    bound = [bind_cpus("node", topology, local_rank=rank, nproc=nproc) for rank in range(nproc)]

    homes = [node_of[each[0]] for each in bound]
    assert homes == sorted(homes)
    counts = [homes.count(node) for node in topology.nodes]
    assert max(counts) - min(counts) <= 1


# ---- what cannot be ----------------------------------------------------------------------------


def test_an_accelerator_whose_node_is_out_of_bounds_is_told() -> None:
    """With the nodes that are left."""
    topology = Topology(
        cpus=tuple(Cpu(index=i, node=i % 2, socket=0, core=i, cache=0) for i in range(4)),
        accelerator_nodes=(0, 3),
    )

    with pytest.raises(UsageError) as caught:
        bind_cpus("node", topology, local_rank=1, nproc=2)
    assert caught.value.message == (
        "--numa-binding node binds local rank 1 to NUMA node 3, where accelerator 1 is,"
        " and this process may use 4 CPUs of NUMA nodes 0-1 only"
    )
    assert caught.value.hint == "widen its affinity mask or cpuset, or leave out --numa-binding"


def test_fewer_cores_than_workers_is_told() -> None:
    """Hyperthreads are not cores."""
    topology = Topology(
        cpus=tuple(Cpu(index=i, node=0, socket=0, core=i // 2, cache=0) for i in range(4))
    )

    with pytest.raises(UsageError, match="NUMA node 0 has 2 for 3 workers") as caught:
        bind_cpus("exclusive", topology, local_rank=0, nproc=3)
    assert caught.value.hint == "--numa-binding node lets workers share the cores of a NUMA node"


def test_an_unknown_machine_is_told() -> None:
    """There is nothing to bind to."""
    with pytest.raises(UsageError, match="needs to know the CPUs of this machine, and found 0"):
        bind_cpus("node", Topology(cpus=()), local_rank=0, nproc=1)


@pytest.mark.parametrize("local_rank", [-1, 2])
def test_a_rank_that_is_not_there_is_a_mistake(local_rank: int) -> None:
    """Of the caller, not of the user."""
    cpu = Cpu(index=0, node=0, socket=0, core=0, cache=0)

    with pytest.raises(ValueError, match=f"local rank {local_rank} is not one of 2"):
        bind_cpus("node", Topology(cpus=(cpu,)), local_rank=local_rank, nproc=2)


# ---- lists of CPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((0, 2, 3), "0,2-3"), ((9, 10), "9-10")],
)
def test_lists_of_cpus(cpus: tuple[int, ...], text: str) -> None:
    """As the kernel writes them."""
    assert format_cpus(cpus) == text
    assert parse_cpus(text + "\n") == cpus


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cpus_is_read_as_it_was_written(cpus: frozenset[int]) -> None:
    """Whatever its order was."""
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "1-", "1-2-3", "0x1"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid"):
        parse_cpus(text)


# ---- reading a machine -------------------------------------------------------------------------


def test_a_machine_is_read(tmp_path: Path) -> None:
    """Cores and caches are known by their lowest CPU, also where that is not allowed."""
    machine = Machine(
        sockets=2, caches_per_node=2, cores_per_cache=2, threads=2, hidden=frozenset({4})
    )
    machine.write(tmp_path)

    topology = machine.read(tmp_path)

    by_index = {cpu.index: cpu for cpu in topology.cpus}
    assert set(by_index) == set(range(16)) - {4}
    assert by_index[0] == Cpu(index=0, node=0, socket=0, core=0, cache=0)
    assert by_index[11] == Cpu(index=11, node=0, socket=0, core=3, cache=2)
    assert by_index[12] == Cpu(index=12, node=1, socket=1, core=4, cache=4)


def test_a_machine_that_says_nothing_is_one_node(tmp_path: Path) -> None:
    """Every CPU is a core, all share a cache, and accelerators are near."""
    topology = read_topology(tmp_path, {0, 1}, ["0000:1a:00.0", None])

    assert topology.cpus == tuple(Cpu(index=i, node=0, socket=0, core=i, cache=0) for i in (0, 1))
    assert topology.accelerator_nodes == (0, 0)


def test_what_is_missing_is_taken_from_the_node(tmp_path: Path) -> None:
    """Its socket and its cache; and a CPU of no node is on the first."""
    put(tmp_path / "devices/system/node/node2/cpulist", "0-1")
    put(tmp_path / "devices/system/node/node3/cpulist", "2-3")
    put(tmp_path / "devices/system/node/node4/cpulist", "")
    put(tmp_path / "devices/system/cpu/cpu0/topology/physical_package_id", "nonsense")
    put(tmp_path / "devices/system/cpu/cpu0/topology/thread_siblings_list", "nonsense")

    topology = read_topology(tmp_path, {0, 3, 9}, [])

    assert topology.cpus == (
        Cpu(index=0, node=2, socket=2, core=0, cache=0),
        Cpu(index=3, node=3, socket=3, core=3, cache=2),
        Cpu(index=9, node=2, socket=2, core=9, cache=0),
    )
    assert topology.nodes == (2, 3)


@pytest.mark.parametrize(("sockets", "node"), [(1, 0), (2, None)])
def test_an_accelerator_of_unknown_node(sockets: int, node: int | None, tmp_path: Path) -> None:
    """It is on the only node; where there are several, its rank is spread as without one."""
    machine = Machine(sockets=sockets, gpu_nodes=(-1, -1))
    machine.write(tmp_path)

    topology = machine.read(tmp_path)

    assert topology.accelerator_nodes == (node, node)
    bound = [bind_cpus("node", topology, local_rank=rank, nproc=2) for rank in range(2)]
    assert [each[0] for each in bound] == ([0, 4] if sockets == 2 else [0, 0])


def test_this_machine_is_read() -> None:
    """Its own CPUs, and whatever accelerators it has."""
    topology = read_topology()

    assert topology.nodes
    if hasattr(os, "sched_getaffinity"):
        assert {cpu.index for cpu in topology.cpus} == os.sched_getaffinity(0)


# ---- accelerators ------------------------------------------------------------------------------

GPUS = (("GPU-1b2c-0", 0, 0x1A), ("GPU-1b2d-1", 0, 0xDC), ("GPU-3d4e-2", 0x10001, 0x03))
ADDRESSES = ("0000:1a:00.0", "0000:dc:00.0", "10001:03:00.0")


class FakeNvml:
    """NVML as ctypes sees it."""

    def __init__(self, gpus: Sequence[tuple[str, int, int]] = GPUS) -> None:
        self.gpus = gpus
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 1000 + index.value
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: Any) -> int:  # noqa: N802
        assert size.value == 96
        uuid.value = self.gpus[handle.value - 1000][0].encode()
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:  # noqa: N802
        _, domain, bus = self.gpus[handle.value - 1000]
        legacy, full = b"0000:FF:1F.0", b"00000000:FF:1F.0"
        info.raw = struct.pack("=16s5I32s", legacy, domain, bus, 0, 0x233010DE, 0, full)
        return 0


@pytest.mark.parametrize(
    ("visible", "addresses"),
    [
        (None, ADDRESSES),
        ("", ()),
        ("2,0", (ADDRESSES[2], ADDRESSES[0])),
        (" 1 ,-1,0", (ADDRESSES[1],)),
        ("0,9,1", (ADDRESSES[0],)),
        ("GPU-3d4e-2,GPU-1b2c", (ADDRESSES[2], ADDRESSES[0])),
        ("GPU-1b", ()),
        ("MIG-1,GPU-3d", (None, ADDRESSES[2])),
        ("NoDevFiles", ()),
        ("²", ()),
    ],
)
def test_visible_accelerators(
    visible: str | None, addresses: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of CUDA_VISIBLE_DEVICES, up to the first that is not there."""
    nvml = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert visible_pci_addresses(env) == addresses
    assert nvml.open == 0


def test_visible_accelerators_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told of them."""
    machine = Machine(sockets=2)
    machine.write(tmp_path)
    for address, node in zip(ADDRESSES, (0, 1, 0), strict=True):
        put(tmp_path / f"bus/pci/devices/{address}/numa_node", str(node))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")

    assert read_topology(tmp_path, machine.allowed).accelerator_nodes == (1, 0)


class FailingNvml(FakeNvml):
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 9


class ForgetfulNvml(FakeNvml):
    def nvmlDeviceGetHandleByIndex_v2(self, *_: Any) -> int:  # noqa: N802
        return 15  # fallen off the bus


def test_accelerators_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, one that does not answer, one of another age, and a lost device."""

    def missing(name: str) -> None:
        raise OSError(name)

    for nvml, addresses in (
        (missing, ()),
        (lambda _: FailingNvml(), ()),
        (lambda _: SimpleNamespace(), ()),
        (lambda _: ForgetfulNvml(), (None, None, None)),
    ):
        monkeypatch.setattr(ctypes, "CDLL", nvml)
        assert visible_pci_addresses({}) == addresses
