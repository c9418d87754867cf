"""A machine as values: its CPUs, its accelerators and the links between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from meshrun.host.visibility import CUDA

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Names of PCI connections in ``nvidia-smi topo``, nearest first."""
NEARNESS = ("same switch", "same root", "same NUMA node", "another NUMA node")


class Cpu(Struct, frozen=True, kw_only=True):
    """One logical CPU that this process may use."""

    index: int
    node: int
    """Its NUMA node."""
    socket: int
    core: int
    """Its physical core: the lowest logical CPU of the core, allowed or not."""
    cache: int
    """Its largest cache: the lowest logical CPU that shares it, allowed or not."""


class Topology(Struct, frozen=True, kw_only=True):
    """The parts of a machine that matter for binding."""

    cpus: tuple[Cpu, ...]
    """The CPUs this process may use; empty if they are unknown."""
    accelerator_nodes: tuple[int | None, ...] = ()
    """NUMA node of each visible accelerator by local index, ``None`` if unknown."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes with a CPU that this process may use, in order."""
        return tuple(sorted({cpu.node for cpu in self.cpus}))

    def with_accelerators(self, places: Sequence[int]) -> Topology:
        """Return the topology with only the accelerators at ``places``, in that order."""
        known = self.accelerator_nodes
        return replace(self, accelerator_nodes=tuple(known[place] for place in places))


class Nics(Struct, frozen=True, kw_only=True):
    """The network cards or interfaces nearest to a GPU, all equally near."""

    names: tuple[str, ...]
    nearness: str
    """One of ``NEARNESS``."""
    ports: tuple[str, ...] = ()
    """The linked port of each RDMA card, such as ``mlx5_0:1``."""

    def __str__(self) -> str:
        return f"{', '.join(self.names)} ({self.nearness})"


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU, or a MIG instance of one, and its location in the machine."""

    entry: str
    """Its entry in a visibility variable: a number, a UUID or the name of a MIG instance."""
    index: int | None = None
    """Its number in the whole machine, as in ``nvidia-smi``; ``None`` if unknown."""
    uuid: str = ""
    address: str | None = None
    """Its PCI address; for a MIG instance, that of its GPU."""
    model: str = ""
    mig_uuids: tuple[str, ...] = ()
    numa_node: int | None = None
    cards: Nics | None = None
    """The RDMA cards nearest to it, if detected."""
    interfaces: Nics | None = None
    """The network interfaces nearest to it, if detected."""

    @property
    def label(self) -> str:
        """Its name in messages: its number, or the name of a MIG instance."""
        is_whole = self.index is not None and not self.uuid.startswith("MIG-")
        return str(self.index) if is_whole else self.entry

    @property
    def nics(self) -> Nics | None:
        """The RDMA cards nearest to it, or else the interfaces."""
        return self.cards or self.interfaces


class GpuLinks(Struct, frozen=True, kw_only=True):
    """Links between the GPUs that a launch sees, by local index."""

    pairs: tuple[tuple[str, ...], ...]
    """``pairs[i][j]`` is ``NV18`` for 18 NVLinks, one of ``LEVELS``, ``X`` for i == j, or ``?``."""

    def between(self, places: Sequence[int]) -> GpuLinks:
        """Return the links between the GPUs at ``places``, in that order."""
        return GpuLinks(
            pairs=tuple(tuple(self.pairs[one][other] for other in places) for one in places)
        )

    def weakest(self, devices: Sequence[int]) -> str | None:
        """Return the slowest link between any two of ``devices``; ``None`` for fewer than two."""
        here = [device for device in devices if device < len(self.pairs)]
        return self.weakest_of([self.pairs[one][other] for one, other in combinations(here, 2)])

    @staticmethod
    def weakest_of(links: Sequence[str]) -> str | None:
        """Return the slowest of ``links``, ``None`` if there are none."""
        return min(links, key=_strength, default=None)


class HostFacts(Struct, frozen=True, kw_only=True):
    """The facts about this machine that a plan needs."""

    hostname: str
    usable_cores: int
    """Cores this process may use, by affinity and cgroup quota; at least 1."""
    bound_cores: int = 0
    """Cores that affinity lets this process use; 0 if unknown."""
    cores: int = 0
    """Cores of the machine; 0 if unknown."""
    may_bind: bool = True
    """Whether processes may be bound to CPUs, if a plan needs to know."""
    accelerator: str | None
    """torch device type of the accelerator torch was built for, such as ``cuda``, or ``None``."""
    accelerator_count: int
    """Number of accelerators visible to this process."""
    visible_devices: tuple[str, ...] | None = None
    """The entries of the visibility variable, or ``None`` if it is not set."""
    visibility: tuple[str, ...] = (CUDA,)
    """The visibility variable of this machine's accelerators, and others that must agree."""
    gpus: tuple[Gpu, ...] = ()
    """The visible accelerators by local index, as far as known."""
    topology: Topology | None = None
    """CPUs and NUMA nodes, if a plan needs them."""
    links: GpuLinks | None = None
    """Links between its GPUs, if requested and known."""
    domain: str = ""
    """NVML's name of this node's NVLink domain, if requested and known."""
    networks: tuple[tuple[str, str], ...] = ()
    """(interface, network) of each address except loopback and link-local ones, if requested."""


UNKNOWN_HOST = HostFacts(hostname="", usable_cores=1, accelerator=None, accelerator_count=0)
"""Another machine, about which nothing is known."""


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the numbers of a CPU list in the kernel's format, in ascending order.

    Raises:
        ValueError: If ``text`` is not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        run = range(int(first), int(last if dash else first) + 1)
        if not run or run[0] < 0:
            raise ValueError(f"`{part}` is not a range of CPUs")
        cpus.update(run)
    return tuple(sorted(cpus))


def _strength(link: str) -> int:
    if link.startswith("NV"):
        return 100 + int(link[2:])
    return -LEVELS.index(link) if link in LEVELS else -len(LEVELS)
