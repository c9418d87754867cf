"""The streams of ranks: pipes to the console, files, and files that the console follows.

A stream that goes to a file is written there by the rank itself, so that nothing it has flushed
is lost with the launcher, and a slow terminal holds up no rank. The console then reads the file.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
import termios
import time
from collections.abc import Callable
from functools import partial

from meshrun.console.collapsing import collapsing_for
from meshrun.console.console import Console, RankStream
from meshrun.console.line_copy import LineCopy
from meshrun.console.prefix import line_prefix
from meshrun.console.repeats import Repeats
from meshrun.host.inotify import WriteNotices
from meshrun.host.log_file import Opener, append_to_log, open_log
from meshrun.host.reactor import Reactor
from meshrun.plan.log_files import RankFiles, StreamFile
from meshrun.plan.plan import LaunchPlan, RankPlan

_READ_BYTES = 64 * 1024
"""More is slower: it does not stay in the processor's cache, and is mapped again each time."""
_READ_BYTES_IN_STEP = 8 * 1024
"""Where like lines become one: no rank is to get far ahead."""
_LEAST_COLUMNS = 20
_TAIL_BYTES = 4096
_LOOK_AGAIN_NS = 100_000_000
"""How often to look at files for which the system gives no notice."""


class _Source:
    """One stream that is read here: where it comes from and where it goes."""

    def __init__(
        self, rank: int, to_stderr: bool, fd: int, path: str | None, stream: RankStream
    ) -> None:
        self.rank = rank
        self.to_stderr = to_stderr
        self.fd = fd
        self.path = path
        """The file that is followed, or ``None`` for a pipe."""
        self.stream = stream
        self.copy: LineCopy | None = None
        self.ended = False
        """Whether the file is no longer written."""
        self.last_words = ""
        """What the file gets once it was read, since it is printed elsewhere."""


class Output:
    """All streams of the ranks of this node; ``printed`` is called with a rank that printed."""

    def __init__(
        self,
        plan: LaunchPlan,
        console: Console,
        reactor: Reactor,
        printed: Callable[[int], None],
        opener: Opener,
    ) -> None:
        self._plan = plan
        self._hostname = socket.gethostname()
        self._console, self._reactor, self._printed = console, reactor, printed
        self._opener = opener
        self._pipes: dict[int, _Source] = {}
        self._ahead: set[int] = set()
        """Pipes that are not read until other ranks have printed as much."""
        self._tails: dict[_Source, None] = {}
        self._grown: dict[_Source, None] = {}
        """Followed files that may have more to read."""
        self._unwatched: set[_Source] = set()
        self._look_at_ns = 0
        self._tail: dict[int, bytes] = {}
        """What each rank wrote last on stderr, where it is read here."""
        self._error_files: dict[int, str] = {}
        self._reading = True
        self._calls: dict[int, int] = {}
        """The last call that each rank has made, if it is one that makes calls."""
        self._collapsing = collapsing_for(plan, console)
        self._repeats = Repeats()
        self._prints_once = plan.request.console.prefix != "torchrun"
        self._errors: dict[int, RankStream] = {}
        """Where stderr of each rank is printed."""
        self._watch: WriteNotices[_Source] = WriteNotices()
        if self._watch.fileno() >= 0:
            reactor.add_reader(self._watch.fileno(), self._on_written)

    def replan(self, plan: LaunchPlan) -> None:
        """The nodes have met: this is the plan now."""
        if self._collapsing is not None:  # which names ranks by the plan they were started with
            for fd in list(self._pipes):
                while fd in self._pipes and select.select([fd], [], [], 0)[0]:
                    self._read_pipe(fd)
                if fd in self._pipes:  # somebody we may not end holds it open
                    self._close_pipe(fd)
            self._collapsing.flush()
        self._plan = plan
        self._collapsing = collapsing_for(plan, self._console)

    # ---- streams ---------------------------------------------------------------------------

    def window_for(self, rank: RankPlan) -> dict[str, str]:
        """Return the variables that tell a rank how large the part of our terminal for it is."""
        if (window := self._console.window) is None:
            return {}
        prefix = line_prefix(self._plan, rank, self._hostname)
        shown = prefix() if callable(prefix) else prefix
        columns = window.columns - len(shown.decode(errors="replace"))
        if columns < _LEAST_COLUMNS:
            return {}
        return {"COLUMNS": str(columns), "LINES": str(window.lines)}

    def open(self, rank: RankPlan, files: RankFiles) -> list[int]:
        """Return the rank's ends of its stdout and stderr, for the caller to hand over and close.

        Raises:
            HostError: If a log file cannot be made.
        """
        shown = self._plan.shown is None or rank.rank in self._plan.shown
        ends = []
        for to_stderr, file in ((False, files.stdout), (True, files.stderr)):
            copy_path = files.filtered_stderr if to_stderr else files.filtered_stdout
            teed = file.path is not None and file.printed
            copy = self._copy(rank, to_stderr, copy_path) if teed else None
            source, end = self._open_stream(rank, file, to_stderr, shown and file.printed)
            if to_stderr:
                self._tail.pop(rank.rank, None)
                self._error_files[rank.rank] = file.path or ""
            if source is not None:
                source.copy = copy
            ends.append(end)
            if source is not None and source.path is None:
                self._pipes[source.fd] = source
                if self._reading:
                    self._register(source.fd)
            elif source is not None:
                self._tails[source] = None
                self._grown[source] = None
        return ends

    def _open_stream(
        self, rank: RankPlan, file: StreamFile, to_stderr: bool, wanted: bool
    ) -> tuple[_Source | None, int]:
        if file.path is None and not wanted:
            return None, os.open(os.devnull, os.O_WRONLY)
        if file.path is not None:
            end = open_log(file.path, self._opener)
            if not wanted:
                return None, end
            ours = self._opener(file.path, os.O_RDONLY)
        else:
            ours, end = os.pipe()
            os.set_blocking(ours, False)
        prefix = line_prefix(self._plan, rank, self._hostname, teed=file.path is not None)
        stream = self._console.stream(
            rank=rank.rank, prefix=prefix, to_stderr=to_stderr, has_stdin=rank.local_rank == 0
        )
        return _Source(rank.rank, to_stderr, ours, file.path, stream), end

    def _copy(self, rank: RankPlan, to_stderr: bool, path: str) -> LineCopy | None:
        logs = self._plan.request.logs
        needles = logs.stderr_filters if to_stderr else logs.stdout_filters
        if not needles or not path:
            return None
        prefix = line_prefix(self._plan, rank, self._hostname, copied=True)
        return LineCopy(path, needles, prefix, self._opener)

    # ---- reading ---------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether there is something to read at once."""
        return bool(self._grown) and self._reading

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`read_files` has to be called again, or ``None``."""
        if self.has_more:
            return 0
        times = [self._collapsing.next_due_ns if self._collapsing else self._repeats.next_due_ns]
        if self._unwatched and self._reading:
            times.append(self._look_at_ns)
        return min((at for at in times if at is not None), default=None)

    def pause_or_resume(self) -> None:
        """Read ranks only while the reader of our own output keeps up."""
        if self._reading != self._console.is_full:
            return
        self._reading = not self._reading
        for fd in self._pipes.keys() - self._ahead:
            if self._reading:
                self._register(fd)
            else:
                self._reactor.remove(fd)

    def read_files(self) -> None:
        """Take the next piece of each followed file that has grown."""
        self._show_due()
        if not self._reading:
            return
        for fd in list(self._ahead):
            if not self._is_ahead(self._pipes[fd]):
                self._ahead.remove(fd)
                self._register(fd)
        now_ns = time.monotonic_ns()
        if self._unwatched and now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + _LOOK_AGAIN_NS
            self._grown.update(dict.fromkeys(self._unwatched))
        for source in list(self._grown):
            if self._console.is_full:
                return
            if self._read(source):
                continue
            if source.ended:
                self._take(source, b"")
                self._close_tail(source)
            else:
                del self._grown[source]
                self._arm(source)

    def _show_due(self) -> None:
        if self._collapsing is not None:
            self._collapsing.show_due()
        for rank, text in self._repeats.due(time.monotonic_ns()).items():
            self._console.feed(self._errors[rank], text)

    def begin(self) -> None:
        """A rank begins its program."""
        if self._collapsing is not None:
            self._collapsing.begin()

    def end_call(self, rank: int, number: int) -> None:
        """A rank has made a call; once all have, print what they said in it, and that it ended."""
        self._calls[rank] = number
        nproc = self._plan.layout.nproc_per_node[self._plan.node_rank]
        if len(self._calls) < nproc or min(self._calls.values()) < number:
            return
        for fd, source in list(self._pipes.items()):
            self._read_until(source, _count_unread(fd))
        for source in self._tails:
            read = os.lseek(source.fd, 0, os.SEEK_CUR)
            self._read_until(source, os.fstat(source.fd).st_size - read)
        self._let_go()
        if self._collapsing is not None:
            self._collapsing.end_lines()
        for source in (*self._pipes.values(), *self._tails):
            self._console.feed(source.stream, b"")
        self._console.end_call(number)

    def _read_until(self, source: _Source, left: int) -> None:
        """Read what there is now: a thread may go on printing."""
        while left > 0 and (data := os.read(source.fd, min(left, self._read_bytes))):
            self._take(source, data)
            left -= len(data)

    def end_generation(self) -> None:
        """The previous ranks have exited: close their files once they are read to the end."""
        self._let_go()
        self._repeats = Repeats()
        for source in self._tails:
            source.ended = True
            self._grown[source] = None
        if self._collapsing is not None:
            self._collapsing.begin_generation()

    def _arm(self, source: _Source) -> None:
        if source in self._unwatched or source.path is None:
            return
        if not self._watch.arm(source.fd, source):
            self._unwatched.add(source)
        if self._read(source):  # written between the last look and the arming
            self._grown[source] = None

    def _on_written(self) -> None:
        for source in self._watch.written():
            if source in self._tails:
                self._grown[source] = None

    def _on_pipe(self, fd: int) -> None:
        if self._console.is_typed_on():  # since this turn began; a prompt is not torn apart
            return
        if self._is_ahead(self._pipes[fd]):
            self._ahead.add(fd)
            self._reactor.remove(fd)
        else:
            self._read_pipe(fd)

    def _is_ahead(self, source: _Source) -> bool:
        return self._collapsing is not None and self._collapsing.is_ahead(
            source.rank, source.to_stderr
        )

    @property
    def _read_bytes(self) -> int:
        return _READ_BYTES if self._collapsing is None else _READ_BYTES_IN_STEP

    def _read_pipe(self, fd: int) -> None:
        source = self._pipes[fd]
        try:
            data = os.read(fd, self._read_bytes)
        except BlockingIOError:
            return
        self._take(source, data)
        if not data:
            self._close_pipe(fd)

    def _read(self, source: _Source) -> bool:
        """Take the next piece of a file; return whether there was one."""
        data = os.read(source.fd, self._read_bytes)
        if not data and os.fstat(source.fd).st_size < os.lseek(source.fd, 0, os.SEEK_CUR):
            os.lseek(source.fd, 0, os.SEEK_SET)  # it was truncated
            data = os.read(source.fd, self._read_bytes)
        if data:
            self._take(source, data)
        return bool(data)

    def _take(self, source: _Source, data: bytes) -> None:
        if data:
            self._printed(source.rank)
            if source.to_stderr:
                kept = data if len(data) >= _TAIL_BYTES else self._tail.get(source.rank, b"") + data
                self._tail[source.rank] = kept[-_TAIL_BYTES:]
        if self._collapsing is not None:
            self._collapsing.feed(source.rank, source.to_stderr, data)
        else:
            self._print(source, data)
        if source.copy is not None:
            source.copy.feed(data)
            if source.copy.error is not None:
                self._console.note(f"no longer copying lines: {source.copy.error}")
                source.copy = None

    def _print(self, source: _Source, data: bytes) -> None:
        """Print what a rank says, unless it waits for the rank's end, being another's words."""
        if source.to_stderr:
            self._errors[source.rank] = source.stream
            is_whole = not (source.stream.lines.pending or self._console.is_shared)
            if data and is_whole and self._prints_once:
                data = self._repeats.take(source.rank, data, time.monotonic_ns())
                if not data:
                    return
        elif data and (before := self._repeats.go_on(source.rank)):
            self._console.feed(self._errors[source.rank], before)
        self._console.feed(source.stream, data)

    def end(self, rank: int, *, failed: bool) -> None:
        """A rank has ended: print what waited for that, unless all has been said."""
        if text := self._repeats.end(rank, failed=failed):
            self._console.feed(self._errors[rank], text)

    def _register(self, fd: int) -> None:
        self._reactor.add_reader(fd, partial(self._on_pipe, fd))

    def _close_pipe(self, fd: int) -> None:
        del self._pipes[fd]
        if self._reading and fd not in self._ahead:
            self._reactor.remove(fd)
        self._ahead.discard(fd)
        os.close(fd)

    def last_lines(self, rank: int) -> list[str]:
        """Return the last whole lines of a rank's stderr, the last of all last."""
        tail = self._tail.get(rank, b"")
        if not tail and self._error_files.get(rank):
            try:
                with open(self._error_files[rank], "rb", opener=self._opener) as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                    tail = file.read()
            except OSError:
                pass
        lines = tail.decode(errors="replace").splitlines()
        cut = lines[1:] if len(tail) == _TAIL_BYTES else lines  # the first may have lost its start
        return [line for line in cut if line.strip()]

    def log(self, rank: int, text: str) -> None:
        """Have the file of a rank's stderr, if it has one, end with ``text``; print nothing."""
        for source in self._tails:
            if source.rank == rank and source.to_stderr and not source.ended:
                source.last_words = text
                return
        if self._error_files.get(rank):
            append_to_log(self._error_files[rank], text, self._opener)

    # ---- the end ---------------------------------------------------------------------------

    def finish(self, flush: Callable[[], None], give_up: Callable[[], bool]) -> int:
        """Bring out all that the ranks wrote before they ended; return how many bytes were not.

        Args:
            flush: Waits until our own output takes more.
            give_up: Whether the readers of our own output have had their time.
        """
        while (self._pipes or self._tails or self._console.waiting) and not give_up():
            self.pause_or_resume()
            if self._console.is_full or not (self._pipes or self._tails):
                flush()
                continue
            for fd in list(self._pipes):
                if select.select([fd], [], [], 0)[0]:
                    self._read_pipe(fd)
                else:  # somebody we may not end holds it open
                    self._take(self._pipes[fd], b"")
                    self._close_pipe(fd)
            for source in list(self._tails):
                if not self._read(source):
                    self._take(source, b"")
                    self._close_tail(source)
        if self._collapsing is not None:
            self._collapsing.flush()
        self._let_go()
        while self._console.waiting and not give_up():
            flush()
        return self._drop()

    def _drop(self) -> int:
        """Let go of what was not brought out; return how many bytes that were."""
        left = self._console.drop_waiting()
        for fd in list(self._pipes):
            left += _count_unread(fd)
            self._close_pipe(fd)
        for source in list(self._tails):
            self._close_tail(source)
        return left

    def _let_go(self) -> None:
        """Print all that waits to be known as what other ranks said."""
        for rank, stream in self._errors.items():
            if text := self._repeats.go_on(rank):
                self._console.feed(stream, text)

    def close(self) -> None:
        """Stop watching files."""
        if self._watch.fileno() >= 0:
            self._reactor.remove(self._watch.fileno())
        self._watch.close()

    def _close_tail(self, source: _Source) -> None:
        del self._tails[source]
        self._grown.pop(source, None)
        self._unwatched.discard(source)
        os.close(source.fd)
        if source.path is not None and source.last_words:
            append_to_log(source.path, source.last_words, self._opener)


def _count_unread(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
