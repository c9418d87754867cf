"""The streams of ranks: pipes to the console, files, and files that the console follows.

A rank itself writes a stream that goes to a file, so that nothing it has flushed is lost with the
launcher, and a slow terminal delays no rank. The console then reads the file.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from meshrun.console.collapsing import Collapsing
from meshrun.console.console import Console, RankStream
from meshrun.console.lines import LineCopy
from meshrun.console.prefix import line_prefix
from meshrun.console.repeats import Repeats
from meshrun.host.descriptors import close_file
from meshrun.host.folder import Opener, append_to_log, nonblocking, open_log
from meshrun.host.inotify import WriteNotices
from meshrun.host.reactor import Reactor
from meshrun.plan.log_files import RankFiles, StreamFile
from meshrun.plan.plan import LaunchPlan, RankPlan

_READ_BYTES = 64 * 1024
"""More is slower: it does not fit the processor's cache, and memory is mapped for each read."""
_READ_BYTES_COLLAPSING = 8 * 1024
"""So that no rank gets far ahead of the others, whose equal lines become one."""
_LEAST_COLUMNS = 20
_TAIL_BYTES = 16384
"""How much of a rank's stderr to keep; C++ prints a stack of some kilobytes after an error."""
_POLL_EVERY_NS = 100_000_000
"""How often to read files for which the system sends no notifications."""


class _Source(Struct, eq=False):
    """One stream that is read here: where it comes from and where it goes."""

    rank: int
    to_stderr: bool
    fd: int
    path: str | None
    """The file that is followed, or ``None`` for a pipe."""
    stream: RankStream | None
    """Where it is printed, or ``None`` if only its end is kept, for the report of a failure."""
    copy: LineCopy | None = None
    ended: bool = False
    """Whether nobody writes to the file any longer."""
    final_text: str = ""
    """Appended to the file once it has been read to the end, so that it is not printed here."""

    @property
    def is_pipe(self) -> bool:
        """Whether it is a pipe, not a file."""
        return self.path is None


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
        self._create, self._opener = opener, nonblocking(opener)
        self._sources: dict[_Source, None] = {}
        """All streams that are read, in the order in which they were opened."""
        self._ahead: set[_Source] = set()
        """Pipes that are not read until other ranks catch up."""
        self._grown: dict[_Source, None] = {}
        """Followed files that may have more to read."""
        self._unwatched: set[_Source] = set()
        """Followed files for which the system sends no notifications."""
        self._poll_at_ns = 0
        self._tail: dict[int, bytes] = {}
        """The end of each rank's stderr, if it is read here."""
        self._error_files: dict[int, str] = {}
        self._reading = True
        self._noted_unreadable = False
        self._calls: dict[int, int] = {}
        """The last call that each rank has finished, for ranks that serve calls."""
        self._collapsing = Collapsing(plan, console) if plan.request.console.collapse else None
        self._repeats = Repeats()
        self._prints_once = plan.request.console.prefix != "torchrun"
        self._errors: dict[int, RankStream] = {}
        """The stream to which each rank's stderr is printed."""
        self._watch: WriteNotices[_Source] = WriteNotices()
        if self._watch.fileno() >= 0:
            reactor.add_reader(self._watch.fileno(), self._on_written)

    def update_plan(self, plan: LaunchPlan) -> None:
        """Continue with the plan for the nodes that take part."""
        if self._collapsing is not None:  # which names ranks by the plan they were started with
            for source in list(self._sources):
                if source.is_pipe:
                    while self._read(source):
                        pass
                    self._end(source)  # even if a process that we may not kill holds it open
            self._collapsing.flush()
            self._collapsing = Collapsing(plan, self._console)
        self._plan = plan

    # ---- streams ---------------------------------------------------------------------------

    def window_for(self, rank: RankPlan) -> dict[str, str]:
        """Return variables with the size of the terminal that is left beside a rank's prefix."""
        if (window := self._console.window) is None:
            return {}
        prefix = line_prefix(self._plan, rank, self._hostname)
        shown = prefix() if callable(prefix) else prefix
        columns = window.columns - len(shown.decode(errors="replace"))
        if columns < _LEAST_COLUMNS:
            return {}
        return {"COLUMNS": str(columns), "LINES": str(window.lines)}

    def open(self, rank: RankPlan, files: RankFiles) -> list[int]:
        """Return the rank's ends of its stdout and stderr, for the caller to pass on and close.

        Raises:
            HostError: If a log file cannot be created.
        """
        shown = self._plan.shown is None or rank.rank in self._plan.shown
        ends = []
        for to_stderr, file in ((False, files.stdout), (True, files.stderr)):
            if to_stderr:
                self._tail.pop(rank.rank, None)
                self._error_files[rank.rank] = file.path or ""
            copy = self._copy(rank, to_stderr, file.filtered)  # creates its file in any case
            is_printed = shown and file.printed
            if is_printed or (to_stderr and file.path is None):
                ends.append(self._begin(rank, file, to_stderr, copy, is_printed=is_printed))
            elif file.path is not None:
                ends.append(open_log(file.path, self._create))
            else:
                ends.append(os.open(os.devnull, os.O_WRONLY))
        return ends

    def _begin(
        self,
        rank: RankPlan,
        file: StreamFile,
        to_stderr: bool,
        copy: LineCopy | None,
        *,
        is_printed: bool,
    ) -> int:
        """Begin to read a stream, and return the rank's end of it."""
        if file.path is not None:
            end = open_log(file.path, self._create)
            read_fd = self._opener(file.path, os.O_RDONLY)
        else:
            read_fd, end = os.pipe()
            os.set_blocking(read_fd, False)
        stream = None
        if is_printed:
            prefix = line_prefix(self._plan, rank, self._hostname, teed=file.path is not None)
            may_prompt = rank.local_rank == 0 and os.isatty(0)
            stream = self._console.stream(
                rank=rank.rank, prefix=prefix, to_stderr=to_stderr, may_prompt=may_prompt
            )
        source = _Source(rank.rank, to_stderr, read_fd, file.path, stream, copy)
        self._sources[source] = None
        if not source.is_pipe:
            self._grown[source] = None
        elif self._reading:
            self._register(source)
        return end

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
        """Whether there may be something to read at once."""
        return bool(self._grown) and self._reading

    @property
    def next_read_ns(self) -> int | None:
        """When :meth:`read_files` must be called again, or ``None``."""
        if self.has_more:
            return 0
        times = [self._collapsing.next_due_ns if self._collapsing else self._repeats.next_due_ns]
        if self._unwatched and self._reading:
            times.append(self._poll_at_ns)
        return min((at for at in times if at is not None), default=None)

    def pause_or_resume(self) -> None:
        """Wait for readers of our own output if they are slow, and read ranks if they keep up."""
        self._console.watch_readers(self._reactor)
        if self._reading != self._console.is_full:
            return
        self._reading = not self._reading
        for source in self._sources:
            if not self._reading:
                self._reactor.remove(source.fd)
            elif source.is_pipe and source not in self._ahead:
                self._register(source)

    def read_files(self) -> None:
        """Read the next piece of each followed file that has grown, and print what is due."""
        self._show_due()
        if not self._reading:
            return
        for source in list(self._ahead):
            if not self._is_ahead(source):
                self._ahead.remove(source)
                self._register(source)
        now_ns = time.monotonic_ns()
        if self._unwatched and now_ns >= self._poll_at_ns:
            self._poll_at_ns = now_ns + _POLL_EVERY_NS
            self._grown.update(dict.fromkeys(self._unwatched))
        for source in list(self._grown):
            if self._console.is_full:
                return
            if self._read(source):
                continue
            if source.ended:
                self._end(source)
            else:
                del self._grown[source]
                self._arm(source)

    def _show_due(self) -> None:
        if self._collapsing is not None:
            self._collapsing.show_due()
        for rank, text in self._repeats.due(time.monotonic_ns()).items():
            self._console.feed(self._errors[rank], text)

    def begin(self) -> None:
        """Note that a rank begins its program."""
        if self._collapsing is not None:
            self._collapsing.begin()

    def end_call(self, rank: int, number: int) -> None:
        """Note that a rank has finished a call.

        Once all ranks have, print everything that they wrote during the call, and mark its end.
        """
        self._calls[rank] = number
        nproc = self._plan.layout.nproc_per_node[self._plan.node_rank]
        if len(self._calls) < nproc or min(self._calls.values()) < number:
            return
        for source in self._sources:
            self._catch_up(source)
        self._release_repeats()
        if self._collapsing is not None:
            self._collapsing.end_lines()
        for source in self._sources:
            if source.stream is not None:
                self._console.feed(source.stream, b"")
        self._console.end_call(number)

    def _catch_up(self, source: _Source) -> None:
        """Read what has been written and no more, as a thread of the rank may continue to print."""
        left = self._count_unread(source)
        while left > 0 and (data := self._read(source, min(left, self._read_size))):
            left -= len(data)

    def end_generation(self) -> None:
        """Close the files of ranks that have exited, once they have been read to the end."""
        self._release_repeats()
        self._repeats = Repeats()
        for source in self._sources:
            if not source.is_pipe:
                source.ended = True
                self._grown[source] = None
        if self._collapsing is not None:
            self._collapsing.begin_generation()

    def _arm(self, source: _Source) -> None:
        if source in self._unwatched:
            return
        if not self._watch.arm(source.fd, source):
            self._unwatched.add(source)
        if self._read(source):  # written after the last read and before the watch was armed
            self._grown[source] = None

    def _on_written(self) -> None:
        for source in self._watch.written():
            if source in self._sources:
                self._grown[source] = None

    def _on_pipe(self, source: _Source) -> None:
        if self._console.is_typed_on():  # it may have become so in this turn
            return
        if self._is_ahead(source):
            self._ahead.add(source)
            self._reactor.remove(source.fd)
        elif self._read(source) == b"":
            self._end(source)

    def _is_ahead(self, source: _Source) -> bool:
        return self._collapsing is not None and self._collapsing.is_ahead(
            source.rank, source.to_stderr
        )

    @property
    def _read_size(self) -> int:
        return _READ_BYTES if self._collapsing is None else _READ_BYTES_COLLAPSING

    def _read(self, source: _Source, size: int | None = None) -> bytes | None:
        """Print the next piece of a stream; return it, or ``None`` if a pipe is empty for now.

        It is ``b""`` at the end of a pipe, and if a file has nothing new or cannot be read now.
        """
        size = size or self._read_size
        try:
            data = os.read(source.fd, size)
            if not data and self._count_unread(source) < 0:
                os.lseek(source.fd, 0, os.SEEK_SET)  # it was truncated
                data = os.read(source.fd, size)
        except BlockingIOError:
            return None
        except OSError as error:  # of a broken disk, or a network file system
            self._note_unreadable(source, error)
            return b""
        if data:
            self._take(source, data)
        return data

    def _count_unread(self, source: _Source) -> int:
        """Return how many bytes there are to read; negative if a file was truncated."""
        try:
            if source.is_pipe:
                unread = fcntl.ioctl(source.fd, termios.FIONREAD, bytes(4))
                return int.from_bytes(unread, sys.byteorder)
            return os.fstat(source.fd).st_size - os.lseek(source.fd, 0, os.SEEK_CUR)
        except OSError as error:
            self._note_unreadable(source, error)
            return 0

    def _note_unreadable(self, source: _Source, error: OSError) -> None:
        if not self._noted_unreadable:
            self._noted_unreadable = True
            self._console.note(
                f"cannot read {source.path} ({error.strerror}), so what ranks write to log files"
                " may not be printed"
            )

    def _end(self, source: _Source) -> None:
        """Print what is left of a stream that has ended, and close it."""
        self._take(source, b"")
        self._close(source)

    def _take(self, source: _Source, data: bytes) -> None:
        if data:
            self._printed(source.rank)
            if source.to_stderr:
                kept = data if len(data) >= _TAIL_BYTES else self._tail.get(source.rank, b"") + data
                self._tail[source.rank] = kept[-_TAIL_BYTES:]
        if source.stream is None:
            return
        if self._collapsing is not None:
            self._collapsing.feed(source.rank, source.to_stderr, data)
        else:
            self._print(source, source.stream, data)
        if source.copy is not None:
            source.copy.feed(data)
            if source.copy.error is not None:
                self._console.note(f"no longer copying lines: {source.copy.error}")
                source.copy = None

    def _print(self, source: _Source, stream: RankStream, data: bytes) -> None:
        """Print what a rank wrote, but hold back lines on stderr that repeat another rank's."""
        if source.to_stderr:
            self._errors[source.rank] = stream
            is_whole = not (stream.lines.pending or self._console.is_shared)
            if data and is_whole and self._prints_once:
                data = self._repeats.take(source.rank, data, time.monotonic_ns())
                if not data:
                    return
        elif data and (before := self._repeats.release(source.rank)):
            self._console.feed(self._errors[source.rank], before)
        self._console.feed(stream, data)

    def end(self, rank: int, *, failed: bool) -> None:
        """Note that a rank has ended; print its held lines that are no repetition."""
        if text := self._repeats.end(rank, failed=failed):
            self._console.feed(self._errors[rank], text)

    def _register(self, pipe: _Source) -> None:
        self._reactor.add_reader(pipe.fd, partial(self._on_pipe, pipe))

    def last_lines(self, rank: int) -> list[str]:
        """Return the last whole lines that a rank has written to stderr, in order."""
        own = (each for each in self._sources if each.rank == rank and each.to_stderr)
        behind = [source for source in own if self._count_unread(source)]
        for source in behind:
            if source.is_pipe:
                self._catch_up(source)
        # A file may be far ahead of what could be printed; only its end is read.
        is_known = all(source.is_pipe for source in behind)
        tail = self._tail.get(rank, b"") if is_known else b""
        if not tail and self._error_files.get(rank):
            try:
                with open(self._error_files[rank], "rb", opener=self._opener) as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                    tail = file.read()
            except OSError:
                pass
        lines = tail.decode(errors="replace").splitlines()
        whole = lines[1:] if len(tail) == _TAIL_BYTES else lines  # the first may be cut
        return [line for line in whole if line.strip()]

    def log(self, rank: int, text: str) -> None:
        """Append ``text`` to the file of a rank's stderr, if it has one, without printing it."""
        for source in self._sources:
            is_open_file = not (source.is_pipe or source.ended)
            if source.rank == rank and source.to_stderr and is_open_file:
                source.final_text = text
                return
        if self._error_files.get(rank):
            append_to_log(self._error_files[rank], text, self._opener)

    # ---- the end ---------------------------------------------------------------------------

    def finish(self, timeout_s: Callable[[], float | None]) -> int:
        """Print everything that the ranks wrote before they ended; return how many bytes were lost.

        ``timeout_s`` returns how long to wait for readers of our own output.
        """
        while (self._sources or self._console.waiting) and (left_s := timeout_s()) != 0.0:
            self.pause_or_resume()
            if self._console.is_full or not self._sources:
                self._console.wait_for_reader(self._reactor, left_s)
                continue
            for source in list(self._sources):
                if not self._read(source):  # even if a process that we may not kill holds it open
                    self._end(source)
        if self._collapsing is not None:
            self._collapsing.flush()
        self._release_repeats()
        while self._console.waiting and (left_s := timeout_s()) != 0.0:
            self._console.wait_for_reader(self._reactor, left_s)
        return self._drop()

    def _drop(self) -> int:
        """Discard what was not printed; return the number of bytes."""
        left = self._console.drop_waiting()
        for source in list(self._sources):
            is_lost = source.is_pipe and source.stream is not None
            left += self._count_unread(source) if is_lost else 0
            self._close(source)
        return left

    def _release_repeats(self) -> None:
        """Print the lines that were held back as possible repetitions."""
        for rank, stream in self._errors.items():
            if text := self._repeats.release(rank):
                self._console.feed(stream, text)

    def close(self) -> None:
        """Stop watching files."""
        if self._watch.fileno() >= 0:
            self._reactor.remove(self._watch.fileno())
        self._watch.close()

    def _close(self, source: _Source) -> None:
        del self._sources[source]
        self._grown.pop(source, None)
        self._unwatched.discard(source)
        self._ahead.discard(source)
        self._reactor.remove(source.fd)
        self._watch.disarm(source)
        close_file(source.fd)
        if source.path is not None and source.final_text:
            append_to_log(source.path, source.final_text, self._opener)
