"""A rank's part in telling its collectives: a thread that reads torch's flight recorders.

torch records every collective anyway, for all back ends, in rings of 2000 entries
(``TORCH_FR_BUFFER_SIZE``). The thread sleeps until the launcher asks, and needs only the
interpreter's lock: the main thread may wait in a collective, or spin.

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
from functools import partial
from typing import Any

from meshrun.host.title import name_thread
from meshrun.protocol.codec import PACKET_BYTES
from meshrun.protocol.collectives import (
    TIMES,
    WAITS,
    Call,
    GroupCalls,
    RankCalled,
    RankRecords,
    RankTimes,
    RankWaits,
)
from meshrun.worker.group_lifetime import call_around
from meshrun.worker.reporter import Reporter
from meshrun.worker.stack_handler import keep_high
from meshrun.worker.when_imported import when_imported

THREAD = "meshrun-answers"
"""What the thread is called in ``top -H``."""
_MOST_TIMES = 1000
_MOST_CALLS = 8
"""Of a group; those under way come first."""
_RECORDERS = {"": "_dump_fr_trace", "nccl": "_dump_nccl_trace", "xccl": "_dump_xccl_trace"}
"""A recorder for each kind of event that tells when a call ends; the first is gloo's and others'.
Each counts groups and calls by itself."""
_RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``."""
_SIZES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""What programs call torch's internal names."""
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


def answer_questions(fd: int, reporter: Reporter) -> None:
    """Answer what is asked through the pipe ``fd``, once there is a first process group."""
    follow = partial(_follow_groups, keep_high(fd), reporter)
    when_imported("torch.distributed.distributed_c10d", follow)


def _follow_groups(fd: int, reporter: Reporter) -> None:
    from torch._C import _distributed_c10d as c10d

    torch = sys.modules["torch"]
    if str(torch.__version__).startswith("2.10.") and not _SIZES & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # as later versions do by themselves
    started: list[int] = []

    def start(_: object) -> None:
        if os.getpid() in started or reporter.is_in_fork:
            return
        started.append(os.getpid())
        # Not by `threading`: it is no thread of the program's.
        with suppress(RuntimeError):  # at its limit of threads a rank runs on, unobserved
            start_new_thread(_answer, (fd, reporter))
            reporter.tell(RankRecords)

    if has_recorder():
        call_around(c10d.ProcessGroup, "_register_backend", after=start)


def tell_failed_call(reporter: Reporter) -> None:
    """Tell what this rank has called, the last call as one that has not ended."""
    with suppress(Exception):  # another torch's recorder; the exception is what counts
        if has_recorder():
            reporter.tell(RankCalled, groups=read_calls(last_failed=True), has_failed=True)


def has_recorder() -> bool:
    """Whether torch records the collectives of this process."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    return hasattr(c10d, "_dump_fr_trace")


def _answer(fd: int, reporter: Reporter) -> None:
    name_thread(THREAD)
    while True:
        try:
            question = os.read(fd, 1)
            if not question:
                return
            if question == WAITS:
                reporter.tell(RankWaits, place=_place())
                continue
            _prepare_for_events()
            if question == TIMES:
                groups, calls = read_times()
                reporter.tell(RankTimes, groups=groups, calls=calls)
            else:
                reporter.tell(RankCalled, groups=read_calls())
        except OSError:  # the program has closed it
            return
        except Exception:  # noqa: S112 - another torch's recorder
            continue


def _prepare_for_events() -> None:
    """Let this thread ask CUDA whether a call has ended, as torch's recorder of NCCL does.

    It takes a context that is there; CUDA would make one on the first GPU. And it spoils no graph
    that another thread captures.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):
            torch.cuda.set_device(device)  # of this thread alone
            break
    for name in ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"):
        with suppress(AttributeError):
            getattr(ctypes.CDLL(None), name)(ctypes.byref(ctypes.c_int(_RELAXED)))


def _recorded(*, with_calls: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return how far each group is, and the calls in their order, with the name of the group."""
    from torch._C import _distributed_c10d as c10d

    status: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for backend, function in _RECORDERS.items():
        if (dump := getattr(c10d, function, None)) is None:  # another build of torch
            continue
        try:
            # Of this very process; as JSON, which has the same names, it takes 1.7 times as long.
            recorded = pickle.loads(dump(with_calls, False))  # noqa: S301
        except RuntimeError:  # after an error of CUDA, which no event survives
            continue
        for group, each in recorded.get("pg_status", {}).items():
            status[_group_name(group, backend)] = each
        for entry in recorded.get("entries", ()):
            entry["group"] = _group_name(entry["process_group"][0], backend)
            entries.append(entry)
    return status, sorted(entries, key=lambda entry: int(entry["time_created_ns"]))


def _groups() -> dict[str, list[int]]:
    """Return the ranks of each group that this process has now, by its name in a recorder."""
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


def _place() -> str:
    """Return what changes as soon as the main thread or a collective comes any further."""
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
    """Return the last calls of each group that this process has now.

    Args:
        last_failed: Whether the last one has failed, which the recorder takes for its end.
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
            continue  # of a group that had this name before
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
    return list(_that_fit(found))


def read_times() -> tuple[list[GroupCalls], list[list[int]]]:
    """Return the groups of this process, and when its last calls began."""
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


def _that_fit(groups: list[GroupCalls]) -> Iterator[GroupCalls]:
    """Yield as many groups as one packet holds."""
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
    """Return one call; several entries of one number were made as one."""
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
