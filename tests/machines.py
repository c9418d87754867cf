"""Invented machines, and what Linux would report of their CPUs in sysfs."""

from dataclasses import dataclass
from pathlib import Path

from hypothesis import assume
from hypothesis import strategies as st

from meshrun.host.detect_host import read_topology
from meshrun.host.machine import Topology
from meshrun.host.sysfs import numa_node


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine on which the numbers of hyperthread siblings are ``cores`` apart, as on x86."""

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
        """Write the files of sysfs that describe it."""
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
        nodes = [numa_node(sysfs, address) for address in self.pci_addresses]
        return read_topology(sysfs, self.allowed, nodes)


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
