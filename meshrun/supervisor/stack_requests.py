"""Asks ranks for their Python stacks and reads the answers, without blocking."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from meshrun.host.descriptors import unnamed_file
from meshrun.host.forked_call import ForkedCall
from meshrun.host.own_variables import NATIVE_STACKS
from meshrun.host.process_state import SignalState, read_stat, signal_state, threads_blocking
from meshrun.host.processes import die_with_parent, send_signal, send_signal_to_main_thread
from meshrun.host.reactor import Reactor
from meshrun.layout import Layout
from meshrun.layout.labels import merged_label
from meshrun.plan.parse import is_on
from meshrun.protocol import stacks
from meshrun.protocol.collectives import STACKS
from meshrun.supervisor.rank_requests import RankPipes
from meshrun.wording import count, number_ranges, plural

ZYGOTE = -1
"""Stands for the zygote."""
_ZYGOTES_NAME = "the process that starts the ranks"
_CHECK_EVERY_S = 0.002
"""Neither the files that ranks write to nor ``/proc`` can be waited for."""
_READ_BYTES = 256 * 1024
_MOST_NATIVE = 4
_NATIVE_TAKES_S = 10.0
_WHY_SILENT = {
    SignalState.GONE: "has exited",
    SignalState.UNHANDLED: "is not running Python started by meshrun, or has not started it yet",
    SignalState.STOPPED: "is suspended (SIGCONT resumes it)",
    SignalState.TRACED: "is stopped by a debugger",
    SignalState.PENDING: "does not respond: it is blocked in the kernel, or blocks every signal",
    SignalState.RUNNING: "has not responded yet",
    SignalState.DONE: "wrote no stack: it runs another program, ignores all signals, or has closed"
    " meshrun's file",
    SignalState.UNKNOWN: "has not responded",
}
_LISTENS_NO_MORE = "no longer handles meshrun's signal: it runs another program, or reset handlers"
_PYTHON_TAKES_S = 0.05
_BUSY_PYTHON_TAKES_S = 1.0
"""Time to get the interpreter's lock, if all are busy."""
_STOPPED_TAKES_S = 0.5
_TAKES_S = 1.5
_STOPPED = (SignalState.STOPPED, SignalState.TRACED)


class StackRequest:
    """A request to a rank, until the rank has answered or time has run out.

    The rank's thread that answers, or else its handler in Python, writes the stacks of all threads.
    If neither does, a handler in C writes that of the main thread. It follows frames, so it is
    asked once the main thread sleeps, or can be taken to be in native code. Its signal interrupts
    system calls of native code, so a thread that may still answer gets the longer time.

    Args:
        pid: The rank's process.
        has_thread: Whether its thread has been asked.
        has_written: Whether it has ever written to its file, and so has handlers of its own.
        read: Returns what it has written since.
    """

    def __init__(
        self, pid: int, *, has_thread: bool, has_written: bool, read: Callable[[], str]
    ) -> None:
        self.pid, self.has_written, self.read = pid, has_written, read
        self._has_thread = has_thread
        self._began_s = time.monotonic()
        self._blocking: frozenset[str] = frozenset()
        """The threads that block the signal for the main thread's stack, if that has been sent."""
        self._is_main_asked = False
        self.state = SignalState.RUNNING
        """The state of that signal, which explains silence."""
        if not has_thread:
            self._blocking = threads_blocking(pid, stacks.STACKS_SIGNAL)
            # The signal would end a process without a handler.
            if self._look(stacks.STACKS_SIGNAL) not in (*_STOPPED, SignalState.UNHANDLED):
                send_signal(pid, stacks.STACKS_SIGNAL)

    def proceed(self) -> bool:
        """Take the next step, if there is one; return whether the rank may write more in time."""
        text = self.read()
        if stacks.is_answered(text):
            self._has_thread = False  # no more of it follows
            if not stacks.lacks_main_thread(text):
                self.state = SignalState.DONE
                return False
        took_s = time.monotonic() - self._began_s
        if took_s < _PYTHON_TAKES_S:
            return True
        self.state = self._look(stacks.MAIN_STACK_SIGNAL)
        most_s = _STOPPED_TAKES_S if self.state in _STOPPED else _TAKES_S
        if self.state is SignalState.GONE or took_s > most_s:
            return False
        if self._is_main_asked or self.state is SignalState.UNHANDLED:
            is_done = self.state in (SignalState.DONE, SignalState.UNHANDLED)
            return self._has_thread or not is_done
        blocking = threads_blocking(self.pid, stacks.MAIN_STACK_SIGNAL)
        if str(self.pid) in blocking:
            self.state = SignalState.PENDING
        elif took_s > _BUSY_PYTHON_TAKES_S or (
            # While the main thread sleeps, nothing changes in its frames.
            read_stat(self.pid)[0] in ("S", "D") and not self._has_thread
        ):
            self._blocking, self._is_main_asked = blocking, True
            send_signal_to_main_thread(self.pid, stacks.MAIN_STACK_SIGNAL)
        return True

    def _look(self, signum: int) -> SignalState:
        state = signal_state(self.pid, signum, self._blocking)
        if state is not SignalState.GONE and not self.has_written:
            return SignalState.UNHANDLED  # a handler may still be the zygote's
        return state


class StackRequests:
    """A file for each rank, and the request that is under way.

    Args:
        show: Called with the lines to print once all have answered, or time has run out.
    """

    def __init__(
        self,
        layout: Layout,
        reactor: Reactor,
        pipes: RankPipes,
        show: Callable[[list[str]], None],
    ) -> None:
        self.layout, self._reactor, self._pipes, self._show = layout, reactor, pipes, show
        self._next_check = reactor.call_at(None, self._check, skips=False)
        self._files: dict[int, int] = {}
        self._requests: dict[int, StackRequest] = {}
        """Those to all ranks that were asked."""
        self._awaited: list[StackRequest] = []
        """Those without an answer yet."""
        self._native: ForkedCall[list[str]] | None = None
        self.places: dict[int, str] = {}
        """Where in the user's files ranks are, as of the last answers."""
        self.elsewhere: dict[int, str] = {}
        """Where the other ranks that answered are."""
        self.why_silent: dict[int, str] = {}
        """Why ranks did not answer, such as ``is suspended``."""

    def update_layout(self, layout: Layout) -> None:
        """Take the layout of new ranks, and drop a request that is under way."""
        self.layout = layout
        self._requests, self._awaited = {}, []
        self._next_check.cancel()

    def open(self, rank: int) -> int:
        """Return a new descriptor to which the rank writes stacks, for the caller to close."""
        self._close(rank)
        fd = unnamed_file("meshrun-stacks")
        self._files[rank] = fd
        return os.dup(fd)

    def ask(self, pids: Mapping[int, int]) -> None:
        """Ask ranks for their stacks, unless a request is under way.

        Native stacks follow, with py-spy if it is installed. If it is still running for an earlier
        request, it is stopped.
        """
        if self.awaits_answers:
            return
        self._drop_native()
        self.places, self.elsewhere, self.why_silent = {}, {}, {}
        begins = {rank: self._size(rank) for rank in pids}
        with_thread = self._pipes.ask(STACKS, pids)
        self._requests = {
            rank: StackRequest(
                pid,
                has_thread=rank in with_thread,
                has_written=begins[rank] > 0,
                read=partial(self._text, rank, begins[rank]),
            )
            for rank, pid in pids.items()
        }
        self._awaited = [*self._requests.values()]
        self._next_check.restart(_CHECK_EVERY_S)

    def drop(self, rank: int) -> None:
        """Do not show where a rank is that has raised since it was asked."""
        self._requests.pop(rank, None)

    @property
    def awaits_answers(self) -> bool:
        """Whether ranks have been asked, and some may still answer."""
        return self._next_check.is_pending

    @property
    def is_under_way(self) -> bool:
        """Whether there will be more lines to show."""
        return self.awaits_answers or self._native is not None

    def _check(self) -> None:
        """Show the answers once all ranks have answered or time has run out."""
        began_s = time.monotonic()
        self._awaited = [request for request in self._awaited if request.proceed()]
        if self._awaited:  # the ranks need the cores, too
            self._next_check.restart(max(_CHECK_EVERY_S, 4 * (time.monotonic() - began_s)))
            return
        lines = list(self._take_answers())
        self._start_native()
        self._show(lines)

    def crash(self, rank: int) -> stacks.StackDump | None:
        """Return the stacks that a rank wrote when native code crashed, if it did."""
        dump = stacks.parse_dump(self._text(rank, max(0, self._size(rank) - _READ_BYTES)))
        return dump if dump is not None and dump.fatal is not None else None

    def _start_native(self) -> None:
        """Begin to collect the native stacks of some ranks, if py-spy is installed."""
        pids = [each.pid for rank, each in self._requests.items() if rank != ZYGOTE]
        pids = pids[:_MOST_NATIVE]
        is_wanted = bool(pids) and is_on(os.environ.get(NATIVE_STACKS), unset=True)
        if is_wanted and (program := shutil.which("py-spy")):
            with suppress(OSError):  # no process can be started
                self._native = ForkedCall(partial(_collect_native, program, pids))
                self._native.follow(self._reactor, self._show_native)

    def _show_native(self, lines: list[str] | None) -> None:
        self._native = None
        self._show(lines or [])

    def _drop_native(self) -> None:
        self._reactor.drop(self._native)
        self._native = None

    def close(self) -> None:
        """Close all files."""
        for rank in list(self._files):
            self._close(rank)
        self._drop_native()

    # ---- text ------------------------------------------------------------------------------

    def _take_answers(self) -> Iterator[str]:
        """Note where ranks are, or why they did not answer, and yield the lines that say so."""
        dumps: dict[int, stacks.StackDump] = {}
        silent: dict[tuple[bool, str], list[int]] = {}
        for rank, request in self._requests.items():
            if (dump := stacks.parse_dump(request.read())) is not None:
                dumps[rank] = dump
                is_users = any(frame.is_users for frame in dump.main)
                places = self.places if is_users else self.elsewhere
                places[rank] = stacks.stack_place(dump.main, stacks.current_folder())
                continue
            has_listened = request.state is SignalState.UNHANDLED and request.has_written
            why = _LISTENS_NO_MORE if has_listened else _WHY_SILENT[request.state]
            self.why_silent[rank] = why.partition(" (")[0].partition(":")[0]
            silent.setdefault((rank == ZYGOTE, why), []).append(rank)
        if (zygotes := dumps.pop(ZYGOTE, None)) is not None:
            yield from self._describe_dump(zygotes, [ZYGOTE])
        for ranks, dump in stacks.merge(dumps):
            yield from self._describe_dump(dump, ranks)
        for (_, why), ranks_without in silent.items():
            yield f"{self._name(ranks_without)}: {why}"
            yield self._describe_pids(ranks_without)

    def _describe_dump(self, dump: stacks.StackDump, ranks: Collection[int]) -> Iterator[str]:
        folder = stacks.current_folder()
        others = len(dump.others)
        at_least = "at least " if dump.has_more else ""
        more = f" (and {at_least}{count(others, 'other thread')})" if others else ""
        yield f"{self._name(ranks)}: {stacks.stack_place(dump.main, folder)}{more}"
        for line in stacks.describe(dump.main, folder):
            yield f"    {line}"
        for other in dump.others:
            if any(frame.is_users for frame in other):
                yield f"    a thread: {stacks.stack_place(other, folder)}"
        yield self._describe_pids(ranks)

    def _describe_pids(self, ranks: Iterable[int]) -> str:
        pids = sorted(self._requests[rank].pid for rank in ranks)
        return f"    pid{plural(len(pids))} {number_ranges(pids)}"

    def _name(self, ranks: Collection[int]) -> str:
        return _ZYGOTES_NAME if ZYGOTE in ranks else merged_label(self.layout, ranks)

    # ---- files -----------------------------------------------------------------------------

    def _size(self, rank: int) -> int:
        return os.fstat(self._files[rank]).st_size if rank in self._files else 0

    def _text(self, rank: int, begin: int) -> str:
        if rank not in self._files:
            return ""
        return os.pread(self._files[rank], _READ_BYTES, begin).decode(errors="replace")

    def _close(self, rank: int) -> None:
        if rank in self._files:
            os.close(self._files.pop(rank))


def _collect_native(program: str, pids: Sequence[int]) -> list[str]:
    """Return what py-spy prints about each process; it ends with this one."""
    lines, prepare = [], partial(die_with_parent, os.getpid())
    for pid in pids:
        command = [program, "dump", "--native", "--pid", str(pid)]
        with tempfile.TemporaryFile() as output:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    check=False,
                    timeout=_NATIVE_TAKES_S,
                    preexec_fn=prepare,
                )
            output.seek(0)
            lines += output.read().decode(errors="replace").splitlines()
    return lines
