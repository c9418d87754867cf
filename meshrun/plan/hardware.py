"""The choice among this machine's GPUs and CPUs: ``--gpus`` and ``--numa-binding``. Pure.

A number of a GPU is an index into those that this process sees, as in ``cuda:2``: GPUs hidden by a
scheduler or ``CUDA_VISIBLE_DEVICES`` stay hidden, and the same option fits every allocation.

The modes of binding choose what ``torch/numa/binding.py`` of torch 2.13 chooses for a rank whose
accelerator has the same local index. torch refuses a rank without an accelerator; here, such ranks
are spread over the NUMA nodes evenly, neighbors together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from meshrun.errors import LayoutError, UsageError
from meshrun.host.gpus import match_uuid
from meshrun.host.machine import Cpu, Gpu, HostFacts, Topology
from meshrun.host.visibility import CUDA, XPU
from meshrun.plan.choices import NumaBinding
from meshrun.plan.device import DeviceChoice
from meshrun.wording import count, number_ranges, plural

_KINDS = (
    ("a number", re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?|[0-9]{1,9}-[0-9]{1,9}")),
    ("a UUID", re.compile(r"GPU-[0-9A-Za-z-]+")),
    ("the name of a MIG instance", re.compile(r"MIG-[0-9A-Za-z-]+(/\d+/\d+)?")),
)
_MOST = 4096
_ARE_GPUS = ("cuda", "xpu")


def parse_gpus(text: str, flag: str) -> tuple[str, ...]:
    """Return the entries of ``0,2-3``, ``GPU-8932f937,GPU-4a`` or ``MIG-...``, ranges expanded.

    Raises:
        UsageError: If it is not such a list, mixes kinds, or has an entry twice.
    """
    found: list[str] = []
    kinds: dict[str, str] = {}
    for entry in (part.strip() for part in text.split(",")):
        kind = next((kind for kind, form in _KINDS if form.fullmatch(entry)), None)
        if kind is None:
            raise UsageError(
                f"{flag}: `{entry}` names no GPU" if entry else f"{flag}: an entry is empty",
                hint="use numbers such as 0,2-3, UUIDs such as GPU-8932f937, or MIG-... names",
            )
        kinds.setdefault(kind, entry)
        if "-" not in entry or kind != "a number":
            found.append(entry)
            continue
        first, last = map(int, entry.split("-"))
        if not 0 <= last - first < _MOST:
            raise UsageError(
                f"{flag}: `{entry}` is not a range of GPUs",
                hint="put the lower number first, as in 2-3",
            )
        found += map(str, range(first, last + 1))
    if len(kinds) > 1:
        mixed = " and ".join(f"{kind} (`{entry}`)" for kind, entry in kinds.items())
        raise UsageError(
            f"{flag} mixes {mixed}",
            hint="use one kind: CUDA ends its list of devices where the kind changes",
        )
    plain = (str(int(entry)) if entry.isdecimal() else entry for entry in found)
    if twice := [name for name, times in Counter(plain).items() if times > 1]:
        raise UsageError(
            f"{flag} {text} names {twice[0]} more than once", hint="name each GPU once"
        )
    return tuple(found)


def choose_gpus(
    requested: Sequence[str] | None, facts: HostFacts, *, check_host: bool = True
) -> HostFacts:
    """Return the facts about this machine with only the requested GPUs.

    ``None`` chooses all visible ones. Only ``check_host`` makes a machine without GPUs an error: a
    dry run may plan for another.

    Raises:
        UsageError: If a GPU does not exist, or two entries name the same one.
    """
    if requested is None:
        return facts
    if not facts.gpus and not check_host:
        return replace(
            facts,
            accelerator=facts.accelerator or "cuda",
            accelerator_count=len(requested),
            visible_devices=tuple(requested),
            gpus=tuple(Gpu(entry=entry) for entry in requested),
        )
    chosen = [(entry, *_find(entry, facts)) for entry in requested]
    entries: dict[tuple[str, str], str] = {}
    for entry, _, gpu in chosen:
        if (other := entries.setdefault((gpu.entry, gpu.uuid), entry)) != entry:
            raise UsageError(
                f"--gpus: `{other}` and `{entry}` are the same GPU", hint="name each GPU once"
            )
    for entry, _, gpu in chosen:
        if gpu.mig_uuids and len(chosen) > 1:
            raise UsageError(
                f"--gpus {entry} is divided into {count(len(gpu.mig_uuids), 'MIG instance')}, of"
                " which CUDA shows a process only one",
                hint=f"name instances, such as {gpu.mig_uuids[0]}, with --virtual-local-rank",
            )
    if facts.visibility[0] == XPU:  # the order of its list has no meaning
        chosen.sort(key=lambda found: found[1])
    places, gpus = [place for _, place, _ in chosen], tuple(gpu for _, _, gpu in chosen)
    return replace(
        facts,
        accelerator_count=len(gpus) if facts.accelerator else 0,
        visible_devices=tuple(gpu.entry for gpu in gpus),
        gpus=gpus,
        topology=None if facts.topology is None else facts.topology.with_accelerators(places),
        links=None if facts.links is None else facts.links.between(places),
    )


def _find(entry: str, facts: HostFacts) -> tuple[int, Gpu]:
    """Return (index among the visible GPUs, GPU) for an entry."""
    number, _, tile = entry.partition(".")
    if not number.isdecimal():
        return _find_uuid(entry, facts)
    if int(number) >= len(facts.gpus):
        hint = "number the visible GPUs from 0; --nproc-per-node sets the number of workers"
        raise _not_here(entry, facts, hint)
    gpu = facts.gpus[int(number)]
    is_numbered_by_cuda = facts.visible_devices is None and facts.visibility[0] == CUDA
    if tile:
        gpu = replace(gpu, entry=f"{gpu.entry}.{tile}")
    # CUDA counts the fastest first, unlike nvidia-smi, and not those that do not answer.
    elif is_numbered_by_cuda and len({gpu.model for gpu in facts.gpus}) > 1:
        if not gpu.uuid:
            raise UsageError(
                f"--gpus {entry}: the driver cannot reach this GPU",
                hint="leave it out; see `nvidia-smi` and the kernel log",
            )
        gpu = replace(gpu, entry=gpu.uuid)
    return int(number), gpu


def _find_uuid(entry: str, facts: HostFacts) -> tuple[int, Gpu]:
    visible = facts.gpus
    found = [(place, each) for place, gpu in enumerate(visible) for each in match_uuid(gpu, entry)]
    if not found and any(not gpu.uuid for gpu in visible):
        if facts.visibility[0] != CUDA:
            raise UsageError(
                f"--gpus {entry}: the UUIDs of this machine's GPUs are unknown", hint="use numbers"
            )
        return 0, Gpu(entry=entry, uuid=entry)  # CUDA will find it
    if len(found) > 1:
        matches = ", ".join(gpu.uuid for _, gpu in found)
        raise UsageError(
            f"--gpus {entry} may mean {len(found)} GPUs: {matches}", hint="write more of the UUID"
        )
    if not found:
        raise _not_here(entry, facts, "`nvidia-smi -L` lists them; use numbers where nodes differ")
    place, gpu = found[0]
    return place, replace(gpu, entry=gpu.uuid) if facts.visibility[0] == CUDA else gpu


def _not_here(entry: str, facts: HostFacts, hint: str) -> UsageError:
    number = count(len(facts.gpus), "GPU") if facts.gpus else "no GPU"
    where = f"this machine has {number}"
    if facts.visible_devices is not None:
        where = f"{facts.visibility[0]}={','.join(facts.visible_devices)} leaves {number}"
    if entry.startswith("MIG-"):
        names = [name for gpu in facts.gpus for name in (*gpu.mig_uuids, gpu.uuid)]
        names = [name for name in names if name.startswith("MIG-")]
        instances = f"with the MIG instances {', '.join(names)}" if names else "and MIG is off"
        where += f" {instances}" if facts.gpus else ""
    elif not entry.partition(".")[0].isdecimal() and facts.gpus:
        where += f": {', '.join(gpu.uuid for gpu in facts.gpus)}"
    return UsageError(f"--gpus {entry}: no such GPU: {where}", hint=hint)


def check_enough(requested: Sequence[str], workers: int, device: DeviceChoice) -> None:
    """Check that the mesh is on the requested GPUs, and that each worker gets one.

    Raises:
        LayoutError: If there are fewer GPUs than workers.
        UsageError: If the mesh is on another device.
    """
    if len(requested) < workers:
        raise LayoutError(
            f"{workers} workers need {workers} GPUs, but --gpus {','.join(requested)} names"
            f" {len(requested)}",
            hint=f"use at most {count(len(requested), 'worker')} per node, or name more GPUs",
        )
    if device.type not in _ARE_GPUS:
        raise UsageError(
            f"--gpus {','.join(requested)}: the mesh is on {device.type} ({device.reason})",
            hint=f"remove --gpus or --device {device.type}, and check what torch was built for",
        )


def check_cuda_shows(facts: HostFacts, workers: int) -> None:
    """Check that CUDA shows a process a GPU for each worker of those that are visible here.

    Source:
        NVIDIA, "MIG User Guide", "CUDA Device Enumeration"; ``_parse_visible_devices()`` in
        ``torch/cuda/__init__.py``.

    Raises:
        UsageError: If it does not.
    """
    listed = (facts.visible_devices or ()) if facts.visibility[0] == CUDA else ()
    if twice := next((entry for entry in listed if listed.count(entry) > 1), None):
        raise UsageError(
            f"{facts.visibility[0]}={','.join(listed)} names {twice} more than once, so CUDA shows"
            " no GPU",
            hint="name each GPU once; with --virtual-local-rank, ranks may share one",
        )
    divided = next((gpu for gpu in facts.gpus if gpu.mig_uuids), None)
    if divided is not None and workers > 1:
        raise UsageError(
            f"GPU {divided.label} is divided into {count(len(divided.mig_uuids), 'MIG instance')},"
            " of which CUDA shows a process only one, and no other GPU",
            hint=f"leave it out with --gpus, or name instances, such as {divided.mig_uuids[0]},"
            " with --virtual-local-rank",
        )


def choose_cpus(
    mode: NumaBinding, topology: Topology, *, local_rank: int, nproc: int
) -> tuple[int, ...]:
    """Return the logical CPUs that a local rank may run on, in order.

    Args:
        mode: ``node`` and ``socket`` choose all CPUs near its accelerator, ``exclusive`` physical
            cores that no other rank gets, ``core-complex`` the CPUs that share a largest cache.
        topology: This machine.
        local_rank: Number of the rank on this machine, below ``nproc``.
        nproc: Number of ranks on this machine.

    Raises:
        UsageError: If this machine has no such CPUs.
    """
    if not topology.cpus:
        raise UsageError(
            f"--numa-binding {mode}: cannot read the CPU topology of this machine",
            hint="remove --numa-binding",
        )
    homes = _homes(topology, nproc)
    node = homes[local_rank]
    near = [cpu for cpu in topology.cpus if cpu.node == node]
    if not near:
        raise _no_cpus(mode, topology, local_rank)
    # Unused accelerators count as well, so that rank 0 is bound the same way in every launch.
    sharers = [index for index, home in enumerate(homes) if home == node]
    place = sharers.index(local_rank)
    if mode == "socket":
        near = _socket_around(topology, near)
    elif mode == "exclusive":
        near = _share_of_cores(near, place, len(sharers))
    elif mode == "core-complex":
        near = _cache_for(near, place)
    return tuple(sorted(cpu.index for cpu in near))


def _homes(topology: Topology, nproc: int) -> list[int | None]:
    """Return the NUMA node of each local rank, and of the accelerators beyond the last rank."""
    nodes, known = topology.nodes, topology.accelerator_nodes
    spread: list[int | None] = [nodes[rank * len(nodes) // nproc] for rank in range(nproc)]
    homes = [spread[rank] if node is None else node for rank, node in enumerate(known[:nproc])]
    return [*homes, *spread[len(homes) :], *known[nproc:]]


def _socket_around(topology: Topology, near: Sequence[Cpu]) -> list[Cpu]:
    """Return the CPUs of all nodes on the socket; a node's lowest CPU determines its socket."""
    lowest_last = sorted(topology.cpus, key=lambda cpu: -cpu.index)
    socket_of_node = {cpu.node: cpu.socket for cpu in lowest_last}
    socket = socket_of_node[near[0].node]
    return [cpu for cpu in topology.cpus if socket_of_node[cpu.node] == socket]


def _share_of_cores(near: Sequence[Cpu], place: int, sharers: int) -> list[Cpu]:
    """Return the CPUs of a share of whole physical cores; the first shares get one more."""
    cores = sorted({cpu.core for cpu in near})
    each, left = divmod(len(cores), sharers)
    if each < 1:
        raise UsageError(
            "--numa-binding exclusive needs a physical core per worker, but NUMA node"
            f" {near[0].node} has {len(cores)} for {sharers} workers or accelerators",
            hint="use --numa-binding node to share the cores of a NUMA node",
        )
    start = place * each + min(place, left)
    mine = set(cores[start : start + each + (place < left)])
    return [cpu for cpu in near if cpu.core in mine]


def _cache_for(near: Sequence[Cpu], place: int) -> list[Cpu]:
    """Return the CPUs of one cache; ranks take caches in turn, those with the most CPUs first."""
    groups: dict[int, list[Cpu]] = {}
    for cpu in near:
        groups.setdefault(cpu.cache, []).append(cpu)
    caches = sorted(groups, key=lambda cache: (-len(groups[cache]), cache))
    return groups[caches[place % len(caches)]]


def _no_cpus(mode: NumaBinding, topology: Topology, local_rank: int) -> UsageError:
    cpus = count(len(topology.cpus), "CPU")
    where = f"node{plural(len(topology.nodes))} {number_ranges(topology.nodes)}"
    return UsageError(
        f"--numa-binding {mode} binds local rank {local_rank} to NUMA node"
        f" {topology.accelerator_nodes[local_rank]}, where accelerator {local_rank} is, but"
        f" this process may only use {cpus} of NUMA {where}",
        hint="widen the affinity mask or cpuset, or remove --numa-binding",
    )
