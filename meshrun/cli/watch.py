"""``--watch``: launch again whenever a file of the program changes."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

from meshrun.api.launch import read_error
from meshrun.cli.options import Options
from meshrun.cli.read import check_one_node
from meshrun.errors import HostError, ProgramError, UsageError
from meshrun.host.folder import open_private, private_folder, write_private
from meshrun.host.own_variables import WATCH_FILE
from meshrun.host.processes import interrupts_delayed, set_title
from meshrun.host.stderr import note, say
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.caller import WHY, Invocation, as_caller
from meshrun.protocol.result import signal_name
from meshrun.protocol.stacks import current_folder
from meshrun.report.result_text import render_error
from meshrun.start import own_command
from meshrun.supervisor.program_file import check_folder, file_of
from meshrun.supervisor.signals import SignalQueue
from meshrun.wording import count

_LOOK_MS = 1000
"""How often to check files without notification, such as those on a network file system."""
_QUIET_MS = 100
"""How long a burst of writes must have paused to count as ended."""
_Content = tuple[tuple[int, ...], bytes]
"""Metadata that change with each write, and a digest of the contents; empty without a file."""
_OTHER: _Content = ((0,), b"other")
"""A value that differs from that of any file."""


def watch_files(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Launch after each change until signal n arrives; return -n.

    Raises:
        UsageError: If another option makes no sense with ``--watch``.
        MeshrunError: If a launch fails for a reason that no change of the program can fix.
    """
    flag = Options.watch.flag
    if invocation.caller is not None:
        raise UsageError(f"{flag} cannot be used with launch(), which returns a result")
    check_one_node(request, Options.watch)
    if importlib.util.find_spec("watchfiles") is None:
        raise HostError(
            f"{flag} needs the package watchfiles, which is not installed",
            hint="pip install 'meshrun[watch]'",
        )
    set_title("watch", *sys.argv[1:])
    return _Watch(request, options.line.words(without={flag})).run()


class _Watch:
    """One launch after another, each in its own process with its own restarts."""

    def __init__(self, request: LaunchRequest, words: Sequence[str]) -> None:
        self._words = words
        self._files, folders = WatchedFiles(), [check_folder()]
        if (own := file_of(request.program)) is not None:
            self._files.add(os.path.realpath(own))
            folders.append(os.path.dirname(os.path.realpath(own)))
        self._project = tuple(os.path.join(folder, "") for folder in folders)
        self._stop_signals, self._signum = request.stop_signals, 0
        # While a rank is debugged, Ctrl-C and Ctrl-Z are only forwarded.
        self._debuggers = (signal.SIGINT, signal.SIGTSTP) if request.debug_rank is not None else ()
        self._signals = SignalQueue(
            request.stop_signals,
            even_if_ignored=request.stop_even_if_ignored,
            always=(signal.SIGQUIT, signal.SIGCHLD, *request.forwarded_signals, *self._debuggers),
        )

    def run(self) -> int:
        """Launch until signal n arrives; return -n."""
        try:
            while not self._signum:
                code = self._launch()
                if code is not None and not self._signum:
                    self._wait_for_change(code)
        finally:
            self._signals.restore()
        return -self._signum

    def _launch(self) -> int | None:
        """Launch once; return the exit code, or ``None`` if a change ended the launch.

        Raises:
            MeshrunError: If it failed for a reason that no change of the program can fix.
        """
        with private_folder() as folder:
            noted, is_stopping = _RecordedFiles(os.path.join(folder, "files")), False
            own = {**as_caller(folder), WATCH_FILE: noted.path}
            self._files.changed()  # forget earlier changes
            with interrupts_delayed():
                process = subprocess.Popen(
                    own_command("launcher", *self._words),
                    env={**os.environ, **own},
                    start_new_session=True,  # so that this process forwards the terminal's signals
                )
            while process.poll() is None:
                self._wait(process)
                self._add(noted.take())
                if not is_stopping and (changed := self._files.changed()):
                    is_stopping = True
                    with suppress(OSError):
                        write_private(os.path.join(folder, WHY), _describe(changed))
                    process.terminate()
            self._add(noted.take())
            if (error := read_error(folder)) is not None:
                if not isinstance(error, ProgramError):  # no change of the program helps
                    raise error
                say(render_error(error))
        if -process.returncode in (*self._debuggers, signal.SIGPIPE):  # nobody reads the output
            self._signum = -process.returncode
        return None if is_stopping else process.returncode

    def _wait_for_change(self, code: int) -> None:
        """Wait until a file changes or, after a failure, a new file appears beside one."""
        before, changed = self._files.beside(), list[str]()  # before the user can react to the note
        if code:
            end = f"exited with code {code}" if code > 0 else f"killed by {signal_name(-code)}"
        else:
            end = "finished"
        files = count(len(self._files), "file")
        note(f"{end}; waiting for a change in {files}; Ctrl-C ends meshrun")
        while not (changed or self._signum):
            self._wait(None)
            changed = self._files.changed()
            if code and not changed:
                changed = sorted(self._files.beside() - before)
        if changed:
            note(f"{_describe(changed)}; launching again")

    def _wait(self, process: subprocess.Popen[bytes] | None) -> None:
        """Wait until something may have happened; forward signals."""
        self._files.wait(lambda: bool(select.select([self._signals], [], [], 0)[0]))
        for signum in self._signals.take():
            if signum == signal.SIGCHLD:
                continue
            if process is not None:
                process.send_signal(signum)
            if signum in self._stop_signals and (process is None or signum not in self._debuggers):
                self._signum = self._signum or signum

    def _add(self, noted: Iterable[str]) -> None:
        """Watch the files that ranks have noted, if they belong to the project."""
        for line in noted:
            mtime_ns, _, path = line.partition(" ")
            real = os.path.realpath(path)
            if path.startswith(self._project) or real.startswith(self._project):
                self._files.add(real, int(mtime_ns))


class _RecordedFiles:
    """The list to which ranks append the files that they import."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._bytes = 0

    def take(self) -> list[str]:
        """Return what was appended since the last call."""
        try:
            with open(self.path, "rb", opener=open_private) as file:
                file.seek(self._bytes)
                whole, nul, _ = file.read().rpartition(b"\0")
        except FileNotFoundError:  # no rank has started
            return []
        self._bytes += len(whole + nul)
        return [os.fsdecode(line) for line in whole.split(b"\0") if line]


def _describe(changed: Sequence[str]) -> str:
    folder = current_folder()
    first = os.path.relpath(changed[0], folder) if folder else changed[0]
    rest = len(changed) - 1
    return f"{first} and {count(rest, 'other file')} changed" if rest else f"{first} changed"


class WatchedFiles:
    """A growing set of files with their contents.

    ``watchfiles`` only wakes us: the contents decide what has changed, so that rewriting a file
    unchanged or replacing its folder has no effect.
    """

    def __init__(self) -> None:
        self._contents: dict[str, _Content] = {}

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._contents)

    def add(self, path: str, mtime_ns: int | None = None) -> None:
        """Add a file; it counts as changed if it was modified since ``mtime_ns``."""
        if path in self._contents:
            return
        stamp, content = _read(path)
        is_unchanged = mtime_ns is None or (stamp and stamp[0] == mtime_ns)
        self._contents[path] = (stamp, content) if is_unchanged else _OTHER

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until something may have changed, ``done()`` is true, or a second has passed."""
        self._wait(_LOOK_MS, SimpleNamespace(is_set=done))

    def beside(self) -> set[str]:
        """Return all Python files in the folders of the watched files."""
        found = (glob.glob(os.path.join(glob.escape(at), "*.py")) for at in self._folders())
        return {path for paths in found for path in paths}

    def changed(self) -> list[str]:
        """Return the files changed since the last call, once writes have paused."""
        found: dict[str, None] = {}
        while more := self._changed_now():
            found.update(dict.fromkeys(more))
            self._wait(_QUIET_MS)
        return list(found)

    def _changed_now(self) -> list[str]:
        found = []
        for path, (stamp, content) in self._contents.items():
            if _stamp(path) != stamp:
                self._contents[path] = now = _read(path)
                if now[1] != content:
                    found.append(path)
                    # Python would use it if the new source has the same size and mtime in seconds.
                    with suppress(OSError):
                        os.unlink(importlib.util.cache_from_source(path))
        return found

    def _folders(self) -> set[str]:
        return {os.path.dirname(path) for path in self._contents}

    def _wait(self, most_ms: int, done: Any = None) -> None:
        # watchfiles has no descriptor to add to a loop: it asks every 0.1 s whether to stop.
        from watchfiles import watch

        announced = watch(
            *filter(os.path.isdir, self._folders()),
            watch_filter=None,
            step=_QUIET_MS,
            stop_event=done,
            rust_timeout=most_ms,
            yield_on_timeout=True,
            raise_interrupt=False,
            recursive=False,
            ignore_permission_denied=True,
        )
        try:
            with closing(announced):
                next(announced, None)
        except (OSError, RuntimeError):  # a folder was removed, or the limit of watches is reached
            time.sleep(most_ms / 1000)


def _stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> _Content:
    stamp = _stamp(path)
    try:
        # Do not block if a pipe without a writer has replaced the file.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return stamp, b""
            return stamp, hashlib.sha256(file.read()).digest()
    except OSError:
        return stamp, b""
