"""Reads what torch's flight recorders know of the collectives of this rank.

torch records every collective anyway, for all backends, in rings of 2000 entries
(``TORCH_FR_BUFFER_SIZE``).

Source:
    ``FlightRecorder.hpp`` of torch 2.13, and the names in ``distributed_c10d._World``.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from meshrun.protocol.codec import PACKET_BYTES
from meshrun.protocol.collectives import Call, GroupCalls, RankCalled
from meshrun.worker.reporter import Reporter

_MOST_TIMES = 1000
_MOST_CALLS = 8
"""Calls per group; those under way take precedence."""
_RECORDERS = {"": "_dump_fr_trace", "nccl": "_dump_nccl_trace", "xccl": "_dump_xccl_trace"}
"""One recorder per kind of event that marks the end of a call; the first is for gloo and others.
Each numbers groups and calls by itself."""
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""Public names of operations that torch records by internal names."""
_TYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "BFloat16": ("bfloat16", 2),
}


def report_calls(reporter: Reporter, *, last_failed: bool) -> None:
    """Report the calls of this rank after an exception; if the last one failed, as not ended."""
    with suppress(Exception):  # an unknown recorder of another torch: the exception matters more
        if has_recorder():
            reporter.report(RankCalled, groups=read_calls(last_failed=last_failed), has_failed=True)


def has_recorder() -> bool:
    """Return whether torch records the collectives of this process."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    return hasattr(c10d, "_dump_fr_trace")


def _recorded(*, with_calls: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the progress of each group, and all calls in order, with the name of their group."""
    from torch._C import _distributed_c10d as c10d

    status: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for backend, function in _RECORDERS.items():
        if (dump := getattr(c10d, function, None)) is None:  # another build of torch
            continue
        try:
            # Written by this process; JSON, with the same keys, takes 1.7 times as long.
            recorded = pickle.loads(dump(with_calls, False))  # noqa: S301
        except RuntimeError:  # after a CUDA error, which invalidates all events
            continue
        for group, each in recorded.get("pg_status", {}).items():
            status[_group_name(group, backend)] = each
        for entry in recorded.get("entries", ()):
            entry["group"] = _group_name(entry["process_group"][0], backend)
            entries.append(entry)
    return status, sorted(entries, key=lambda entry: int(entry["time_created_ns"]))


def _groups() -> dict[str, list[int]]:
    """Return the ranks of each current group of this process, by the group's name in a recorder."""
    from torch.distributed import distributed_c10d as dist

    world = dist._world
    return {
        _group_name(name, backend): sorted(world.pg_group_ranks[group])
        for group, name in world.pg_names.items()
        if group in world.pg_group_ranks
        for backend in _RECORDERS
        if backend in str(world.pg_backend_config.get(group))
    }


def _group_name(name: str, backend: str) -> str:
    return f"{name}/{backend}" if backend else name


def read_wait() -> str:
    """Return where this rank waits, as in :attr:`RankWaits.place`."""
    status, _ = _recorded(with_calls=False)
    counts = [
        (group, each["last_enqueued_collective"], each["last_completed_collective"])
        for group, each in sorted(status.items())
    ]
    if all(begun == done for _, begun, done in counts):
        return ""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append(id(frame))
        frame = frame.f_back
    return str(hash((tuple(counts), tuple(frames))))


def read_calls(*, last_failed: bool = False) -> list[GroupCalls]:
    """Return the last calls of each current group of this process.

    Args:
        last_failed: Whether the last call has failed, which the recorder takes for its end.
    """
    _, entries = _recorded(with_calls=True)
    latest: dict[str, int] = {}
    calls: dict[str, dict[int, list[dict[str, Any]]]] = {}
    if entries and last_failed:
        entries[-1].update(retired=False, state="scheduled")
    described: dict[str, str] = {}
    for entry in entries:
        name, (_, described_as) = entry["group"], entry["process_group"]
        if entry["is_p2p"] or entry["pg_id"] < latest.get(name, -1):
            continue  # of an earlier group of this name
        if entry["pg_id"] > latest.get(name, -1):
            latest[name], described[name], calls[name] = entry["pg_id"], described_as, {}
        calls[name].setdefault(entry["collective_seq_id"], []).append(entry)
    found = [
        GroupCalls(
            name=name,
            description=described.get(name, ""),
            ranks=ranks,
            calls=list(_last_calls(calls.get(name, {}))),
        )
        for name, ranks in _groups().items()
    ]
    found.sort(key=lambda group: (all(call.is_done for call in group.calls), not group.calls))
    return list(_fitting(found))


def read_times() -> tuple[list[GroupCalls], list[list[int]]]:
    """Return the groups of this process, and the start times of its last calls."""
    _, entries = _recorded(with_calls=True)
    last = [entry for entry in entries if not entry["is_p2p"]][-_MOST_TIMES:]
    described = {entry["group"]: entry["process_group"][1] for entry in last}
    groups = [
        GroupCalls(name=name, description=described[name], ranks=ranks, calls=[])
        for name, ranks in _groups().items()
        if name in described
    ]
    index = {group.name: at for at, group in enumerate(groups)}
    calls = [
        [index[name], entry["collective_seq_id"], entry["time_created_ns"]]
        for entry in last
        if (name := entry["group"]) in index
    ]
    return groups, calls


def _fitting(groups: list[GroupCalls]) -> Iterator[GroupCalls]:
    """Yield as many groups as fit into one packet."""
    left = PACKET_BYTES // 2
    for group in groups:
        left -= 8 * len(group.ranks) + 300 * len(group.calls) + 100
        if left < 0:
            return
        yield group


def _last_calls(entries: Mapping[int, list[dict[str, Any]]]) -> Iterator[Call]:
    made = [_call(number, entries[number]) for number in sorted(entries)]
    first = next((at for at, call in enumerate(made) if not call.is_done), len(made))
    start = max(0, min(first - _MOST_CALLS // 2, len(made) - _MOST_CALLS))
    yield from made[start : start + _MOST_CALLS]


def _call(number: int, entries: list[dict[str, Any]]) -> Call:
    """Return one call; several entries of one number are one coalesced call."""
    ops = list(dict.fromkeys(_op(entry) for entry in entries))
    is_one = len(entries) == 1
    inputs, input_bytes = _tensors(entries[0], "input")
    outputs, output_bytes = _tensors(entries[0], "output")
    return Call(
        number=number,
        op=" + ".join(ops[:3]),
        inputs=inputs if is_one else "",
        outputs=outputs if is_one else "",
        n_bytes=max(input_bytes, output_bytes) if is_one else 0,
        is_done=all(each["retired"] or each["state"] == "completed" for each in entries),
    )


def _op(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return _NAMES.get(name, name.lstrip("_"))


def _tensors(entry: Mapping[str, Any], which: str) -> tuple[str, int]:
    texts, total = [], 0
    for shape, kind in zip(entry[f"{which}_sizes"], entry[f"{which}_dtypes"], strict=False):
        name, size = _TYPES.get(kind, (str(kind).lower(), 0))
        texts.append(f"{name}[{','.join(map(str, shape))}]")
        for length in shape:
            size *= length
        total += size
    more = [f"... {len(texts) - 4} more"] if len(texts) > 4 else []
    return " ".join([*texts[:4], *more]), total
