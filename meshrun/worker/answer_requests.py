"""A thread of each rank that answers the launcher: its stacks, and the collectives it has called.

The thread sleeps until the launcher sends a request, and needs only the interpreter's lock: the
main thread may wait in a collective, or spin. It starts with the program's first other thread or
process group, so a program that has neither may fork as if it ran alone. With a group, it starts
before the connection to the store: a signal would make torch begin its timeout again.

torch records every collective anyway, for all backends, in rings of 2000 entries
(``TORCH_FR_BUFFER_SIZE``).

Source:
    ``FlightRecorder.hpp`` of torch 2.13, and the names in ``distributed_c10d._World``.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import threading
from _thread import start_new_thread  # gevent puts a greenlet in its place
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from meshrun.host.processes import name_thread
from meshrun.protocol import collectives
from meshrun.protocol.codec import PACKET_BYTES
from meshrun.protocol.collectives import Call, GroupCalls
from meshrun.worker.group_lifetime import call_around
from meshrun.worker.imports import when_imported
from meshrun.worker.reporter import Reporter
from meshrun.worker.stack_handler import keep_high, write_stacks

THREAD = "meshrun-answers"
"""The thread's name in ``top -H``."""
_RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``."""
_SIZES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
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


class AnswerRequests:
    """Answers requests once there is another thread or a process group.

    Args:
        requests_fd: The pipe from which requests are read; moved to another descriptor.
        stacks_fd: The file to which stacks are written.
        reporter: Takes the other answers.
    """

    def __init__(self, requests_fd: int, stacks_fd: int, reporter: Reporter) -> None:
        self._requests_fd, self._stacks_fd = keep_high(requests_fd), stacks_fd
        self._reporter = reporter
        self._started = self._records = False
        self._leave_threads = call_around(threading.Thread, "start", before=self.start)
        when_imported("torch.distributed.distributed_c10d", self._follow_groups)

    def _follow_groups(self) -> None:
        from torch._C import _distributed_c10d as c10d

        torch = sys.modules["torch"]
        if str(torch.__version__).startswith("2.10.") and not _SIZES & os.environ.keys():
            os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # the default of later versions
        call_around(c10d.ProcessGroup, "_register_backend", after=self._on_group)

    def _on_group(self, _: object) -> None:
        self.start()
        if self._started and not self._records and has_recorder():
            self._records = self._reporter.report(collectives.RankListens, records=True)

    def start(self, _: object = None) -> None:
        """Start the thread, unless it runs."""
        if self._started or self._reporter.is_in_fork:
            return
        self._started = True
        # Not with `threading`, which would list it among the program's threads.
        try:
            start_new_thread(self._answer_all, ())
        except RuntimeError:  # at its limit of threads, a rank continues unobserved
            self._started = False
        else:
            self._leave_threads()
            self._reporter.report(collectives.RankListens)

    def _answer_all(self) -> None:
        name_thread(THREAD)
        with suppress(OSError):  # the program has closed the pipe
            while request := os.read(self._requests_fd, 1):
                # No more open files, or an unknown recorder of another torch.
                with suppress(Exception):
                    self._answer(request)

    def _answer(self, request: bytes) -> None:
        if request == collectives.STACKS:
            write_stacks(self._stacks_fd)
            return
        if request == collectives.WAITS:
            self._reporter.report(collectives.RankWaits, place=read_wait())
            return
        _prepare_for_events()
        if request == collectives.TIMES:
            groups, calls = read_times()
            self._reporter.report(collectives.RankTimes, groups=groups, calls=calls)
        else:
            self._reporter.report(collectives.RankCalled, groups=read_calls())


def _prepare_for_events() -> None:
    """Prepare this thread for torch's NCCL recorder, which asks CUDA whether a call has ended.

    The thread uses an existing context, since CUDA would create one on the first GPU, and must not
    invalidate a graph that another thread captures.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):
            torch.cuda.set_device(device)  # for this thread only
            break
    for name in ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"):
        with suppress(AttributeError):
            getattr(ctypes.CDLL(None), name)(ctypes.byref(ctypes.c_int(_RELAXED)))


def report_calls(reporter: Reporter, *, last_failed: bool) -> None:
    """Report the calls of this rank after an exception; if the last one failed, as not ended."""
    with suppress(Exception):  # an unknown recorder of another torch: the exception matters more
        if has_recorder():
            reporter.report(
                collectives.RankCalled, groups=read_calls(last_failed=last_failed), has_failed=True
            )


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
