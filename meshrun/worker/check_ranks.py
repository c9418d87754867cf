"""The program of ``--check``: each rank measures, and rank 0 writes all results to a file.

quick|full [PATH ...]

``--check-first`` uses the same functions in forks of the ranks.
"""

from __future__ import annotations

import os
import platform
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshrun.check import measured
from meshrun.check.evaluate import compare_links, slow_ranks
from meshrun.errors import MeshError
from meshrun.host.cores import count_usable_cores
from meshrun.host.folder import write_private
from meshrun.host.own_variables import CHECK_FILE
from meshrun.layout import Layout
from meshrun.mesh.current import current_mesh
from meshrun.mesh.current_layout import current_layout
from meshrun.protocol.packing import pack, unpack

_FULL = tuple(1 << power for power in range(10, 29, 3))
_SIZES = {
    ("quick", "cpu"): (1 << 10, 1 << 20, 1 << 22),
    ("quick", "other"): (1 << 10, 1 << 20, 1 << 27),  # enough to saturate a fast link
    ("full", "cpu"): _FULL,
    ("full", "other"): _FULL,
}
_BUDGET_S = {"quick": 0.02, "full": 0.2}
"""Seconds per operation and size; at least one call is made."""
_EXCHANGED = {"quick": 1 << 22, "full": 1 << 26}
_ROUNDS = {"quick": 3, "full": 15}
_MATRIX = {"cpu": 512, "other": 4096}
_MOST_CALLS = 50
_EXCHANGING_S = {"quick": 0.05, "full": 0.2}
"""Seconds for the exchanges of two ranks: at least three, or a single long one."""
_LONG_S = 1.0
_AGAIN_S = {"quick": 1.0, "full": 10.0}
"""Seconds for another exchange of all pairs that seem slow (the slowest of them certainly are), and
for more matrix products of ranks that seem slow."""
_ATTEMPTS = 10
"""How often to compare the products of all ranks within that time."""


def main() -> None:
    """Measure, gather and write."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # our traceback would not help anybody
    mode, *paths = sys.argv[1:]
    found = gather(measure(mode, paths))
    if found is not None:
        write_private(os.environ[CHECK_FILE], pack(found))
    dist.barrier()


def measure(mode: str, paths: Sequence[str]) -> measured.RankMeasures:
    """Return the measurements of this rank; collective.

    Args:
        mode: ``quick`` or ``full``.
        paths: Folders that should be writable.
    """
    mesh, layout = current_mesh(), current_layout()
    device = torch.device(mesh.device_type)
    rank = dist.get_rank()
    _check_sum("all ranks", dist.group.WORLD, device)
    clock_s = _clock_difference(rank, device)
    collectives: list[measured.Collective] = []
    unsupported: list[str] = []
    for index, dim in enumerate(layout.dim_labels):
        group = mesh.get_group(index)
        if dist.get_world_size(group) > 1:
            _check_sum(dim, group, device)
            collectives += _measure_group(dim, group, device, mode, unsupported)
    exchanges = _Exchanges(layout, device, mode).measure()
    free, whole = _gpu_memory(device)
    here = layout.nproc_per_node[layout.node_rank()]
    return measured.RankMeasures(
        rank=rank,
        host=socket.gethostname(),
        facts=_facts(device),
        clock_s=clock_s,
        shares_cores=device.type == "cpu" and torch.get_num_threads() * here > count_usable_cores(),
        shm_bytes=_shm_bytes(),
        gpu_free_bytes=free,
        gpu_bytes=whole,
        paths={path: _why_not_writable(path) for path in paths},
        gflops=_gflops(device, mode),
        collectives=collectives,
        unsupported=unsupported,
        exchanges=exchanges,
    )


def gather(own: measured.RankMeasures) -> measured.Measured | None:
    """Return the measurements of all ranks, on rank 0."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"meshrun/check/{own.rank}", pack(own))
    if own.rank:
        return None
    ranks = range(dist.get_world_size())
    found = [unpack(store.get(f"meshrun/check/{each}"), measured.RankMeasures) for each in ranks]
    return measured.Measured(layout=current_layout().to_dict(), ranks=found)


def _check_sum(of: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise MeshError if a group does not add numbers up: a backend that does nothing is fast."""
    ones = torch.ones(1, device=device)
    try:
        dist.all_reduce(ones, group=group)
    except RuntimeError:  # unsupported; reported with the other operations
        return
    size = dist.get_world_size(group)
    if (total := ones.item()) != size:
        raise MeshError(
            f"all_reduce over {of} adds {size} ones up to {total:g}: the backend of its group"
            f" ({dist.get_backend_config(group)}) does not work on {device.type}"
        )


def _measure_group(
    dim: str, group: dist.ProcessGroup, device: torch.device, mode: str, unsupported: list[str]
) -> Iterator[measured.Collective]:
    """Yield the time of each operation at each size; all groups of a dim run it at the same time.

    Operations that the group's backend lacks are added to ``unsupported``.
    """
    for op in measured.BUS_FACTOR:
        for length in _SIZES[mode, _kind(device)]:
            try:
                seconds = _seconds(_prepare(op, length, group, device), device, mode)
            except RuntimeError as error:  # includes NotImplementedError
                unsupported.append(f"{op}: {str(error).splitlines()[0]}")
                break
            yield measured.Collective(dim=dim, op=op, bytes=length, seconds=seconds)


def _prepare(
    op: str, length: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """Return a call of an operation on ``length`` bytes."""
    members = dist.get_world_size(group)
    data = torch.zeros(max(length // 4, members), device=device)
    part = data[: data.numel() // members]
    whole = data[: part.numel() * members]
    if op == "all_reduce":
        return lambda: dist.all_reduce(data, group=group)
    if op == "all_gather":
        own = part.clone()
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # since torch 2.13
        return lambda: gather(whole, own, group=group)
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


def _seconds(call: Callable[[], object], device: torch.device, mode: str) -> float:
    call()
    _wait(device)
    own_s = _timed(call, 1, device)
    one = torch.tensor(own_s, device=device)
    dist.all_reduce(one, op=dist.ReduceOp.MAX)  # so that all make the same number of calls
    calls = _calls_in(_BUDGET_S[mode], one.item())
    return _timed(call, calls, device) / calls if calls > 1 else own_s


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "other"


def _timed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return time.perf_counter() - began


def _calls_in(budget_s: float, one_s: float) -> int:
    return int(min(_MOST_CALLS, budget_s / max(one_s, 1e-6)))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


class _Exchanges:
    """Exchanges with one rank after another, each on another node if there are several."""

    def __init__(self, layout: Layout, device: torch.device, mode: str) -> None:
        self._layout, self._mode = layout, mode
        self._rank = dist.get_rank()
        self._sent = torch.zeros(_EXCHANGED[mode] // 4, device=device)
        self._received = torch.empty_like(self._sent)

    def measure(self) -> list[measured.PeerExchange]:
        """Return the time of each exchange; collective.

        What seems slow is measured again while all others wait: a bad link stays slow, while a
        chance disturbance does not repeat.
        """
        peers = list(measured.pairs_of(self._layout, self._rank, _ROUNDS[self._mode]))
        seconds = []
        for peer in peers:
            dist.barrier()
            seconds.append(0.0 if peer is None else self._measured(peer))
        for pair in self._slow_pairs(peers, seconds):
            dist.barrier()
            if self._rank in pair:
                (peer,) = pair - {self._rank}
                turn = peers.index(peer)
                seconds[turn] = min(seconds[turn], self._measured(peer))
        return [
            measured.PeerExchange(peer=peer, bytes=_EXCHANGED[self._mode], seconds=each)
            for peer, each in zip(peers, seconds, strict=True)
            if peer is not None
        ]

    def _slow_pairs(
        self, peers: Sequence[int | None], seconds: Sequence[float]
    ) -> list[frozenset[int]]:
        """Return the pairs whose exchange seems slow, the same on all ranks; collective."""
        met = [[-1 if peer is None else peer, s] for peer, s in zip(peers, seconds, strict=True)]
        mine = self._sent.new_tensor(met)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        longest: dict[frozenset[int], float] = {}
        for rank, row in enumerate(every):
            for peer, s in row.tolist():
                if peer >= 0:
                    pair = frozenset((rank, int(peer)))
                    longest[pair] = max(longest.get(pair, 0.0), s)
        slow = compare_links({pair: 1 / s for pair, s in longest.items()})[1]
        again = sorted(slow, key=lambda pair: (longest[pair], sorted(pair)))
        spent = accumulate(longest[pair] for pair in again)
        return [pair for pair, s in zip(again, spent, strict=True) if s <= _AGAIN_S[self._mode]]

    def _measured(self, peer: int) -> float:
        """Return the median seconds of an exchange with a peer."""
        self._agree(peer, 0.0)  # connects
        seconds = [self._timed(peer)]
        longest_s = self._agree(peer, seconds[0])  # so that both make the same number of calls
        fewest = 2 if longest_s < _LONG_S else 0
        calls = _calls_in(_EXCHANGING_S[self._mode], longest_s)
        for _ in range(max(calls, fewest)):
            seconds.append(self._timed(peer))
            self._agree(peer, 0.0)  # so that neither sends before the other measures
        return median(seconds)

    def _agree(self, peer: int, seconds: float) -> float:
        """Return the longer time of both; by then, each has received all that the other sent."""
        own, theirs = self._sent.new_tensor([seconds]), self._sent.new_zeros(1)
        _swap(peer, own, theirs)
        return float(max(own.item(), theirs.item()))

    def _timed(self, peer: int) -> float:
        return _timed(lambda: _swap(peer, self._sent, self._received), 1, self._sent.device)


def _swap(peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    ours, theirs = dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)
    for work in dist.batch_isend_irecv([ours, theirs]):
        work.wait()


def _gflops(device: torch.device, mode: str) -> float:
    """Return the best of several matrix products; collective.

    All ranks compute at the same time. Those that seem slow get more attempts while the others
    wait: a slow device stays slow, while a chance disturbance does not repeat.
    """
    width = _MATRIX[_kind(device)]
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    one = torch.randn(width, width, device=device, dtype=kind)
    torch.mm(one, one)
    _wait(device)
    dist.barrier()
    times = 5 if mode == "quick" else 20
    seconds = min(_timed(lambda: torch.mm(one, one), 1, device) for _ in range(times))
    every = [one.new_empty(1, dtype=torch.float32) for _ in range(dist.get_world_size())]
    for _ in range(_ATTEMPTS):
        dist.all_gather(every, one.new_tensor([seconds], dtype=torch.float32))
        slow = slow_ranks([1 / each.item() for each in every])
        if not slow:
            break
        if dist.get_rank() in slow:
            until_s = time.perf_counter() + _AGAIN_S[mode] / _ATTEMPTS
            while time.perf_counter() < until_s:
                seconds = min(seconds, _timed(lambda: torch.mm(one, one), 1, device))
    return float(2 * width**3 / seconds / 1e9)


def _clock_difference(rank: int, device: torch.device) -> float:
    """Return by how many seconds this clock is ahead of rank 0's, both read after a barrier."""
    clocks = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    dist.barrier()
    clocks[rank] = time.time()
    dist.all_reduce(clocks)
    return float(clocks[rank] - clocks[0])


def _facts(device: torch.device) -> dict[str, str]:
    found = {"torch": torch.__version__, "Python": platform.python_version()}
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["GPU"] = torch.cuda.get_device_name()
        with suppress(Exception):
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        with (
            suppress(OSError, IndexError),
            open("/proc/driver/nvidia/version", encoding="utf-8") as file,
        ):
            found["NVIDIA driver"] = file.readline().split("  ")[1].strip()
    for name, limit in (("ulimit -n", "RLIMIT_NOFILE"), ("ulimit -l", "RLIMIT_MEMLOCK")):
        hard = resource.getrlimit(getattr(resource, limit))[1]
        found[f"the hard limit of `{name}`"] = "unlimited" if hard < 0 else str(hard)
    return found


def _shm_bytes() -> int | None:
    with suppress(OSError, AttributeError):
        found = os.statvfs("/dev/shm")  # noqa: S108 - nothing is created there
        return found.f_blocks * found.f_frsize
    return None


def _gpu_memory(device: torch.device) -> tuple[int | None, int | None]:
    if device.type != "cuda":
        return None, None
    free, whole = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved(), whole


def _why_not_writable(path: str) -> str:
    """Return why a file cannot be written to a folder, read and removed; "" if it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"meshrun")
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            return "" if file.read() == b"meshrun" else "it does not contain what was written"
    except OSError as error:
        return error.strerror or str(error)


if __name__ == "__main__":
    main()
