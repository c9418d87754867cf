"""A thread of each rank that answers the launcher: its stacks, and the collectives it has called.

The thread sleeps until the launcher sends a request, and needs only the interpreter's lock: the
main thread may wait in a collective, or spin. It starts with the program's first other thread or
process group, so a program that has neither may fork as if it ran alone. With a group, it starts
before the connection to the store: a signal would make torch begin its timeout again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from _thread import start_new_thread  # gevent puts a greenlet in its place
from contextlib import suppress

from meshrun.host.processes import name_thread
from meshrun.protocol import collectives
from meshrun.worker.flight_recorder import has_recorder, read_calls, read_times, read_wait
from meshrun.worker.group_lifetime import call_around
from meshrun.worker.imports import when_imported
from meshrun.worker.reporter import Reporter
from meshrun.worker.stack_handler import keep_high, write_stacks

THREAD = "meshrun-answers"
"""The thread's name in ``top -H``."""
_RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``."""
_SIZES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}


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
