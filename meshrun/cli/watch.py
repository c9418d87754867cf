"""``--watch``: launch again whenever a file of the program changes."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

from meshrun.api.launch import error_file
from meshrun.cli.began import Began
from meshrun.cli.options import Options
from meshrun.cli.words import CommandLine
from meshrun.errors import HostError, ProgramError, UsageError
from meshrun.host.descriptors import say
from meshrun.host.folder import open_private
from meshrun.host.leftovers import private_folder
from meshrun.host.title import set_title
from meshrun.host.watched_files import WatchedFiles
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.caller import PARENT_FOLDER, PARENT_PID, WHY
from meshrun.protocol.result import signal_name
from meshrun.protocol.stacks import current_folder
from meshrun.report.message import render_error
from meshrun.report.result_json import parse_error_json
from meshrun.start import own_command
from meshrun.supervisor.program_file import check_folder, file_of
from meshrun.supervisor.signals import SignalQueue
from meshrun.wording import count
from meshrun.worker.note_files import WATCH


def watch_files(request: LaunchRequest, line: CommandLine, began: Began) -> int:
    """Launch until a signal ends it; return that as -n.

    Raises:
        UsageError: If another option makes no sense with it.
        MeshrunError: If a launch cannot be made, whatever the program is.
    """
    _check(request, began)
    set_title("watch", *sys.argv[1:])
    return _Watch(request, line).run()


def _check(request: LaunchRequest, began: Began) -> None:
    flag = Options.watch.flag
    if began.caller is not None:
        raise UsageError(f"{flag} cannot be used with launch(), which returns a result")
    if request.remote is not None or (request.nnodes or 1) > 1:
        remote = request.remote
        found = count(len(remote.hosts), "host") if remote else count(request.nnodes or 1, "node")
        raise UsageError(
            f"{flag} launches only on this machine, found {found}",
            hint=f"remove {'--hosts or --hostfile' if remote else '--nnodes'}",
        )
    if importlib.util.find_spec("watchfiles") is None:
        raise HostError(
            f"{flag} needs the package watchfiles, which is not installed",
            hint="pip install 'meshrun[watch]'",
        )


class _Watch:
    """One launch after the other, each a process of its own with its own restarts."""

    def __init__(self, request: LaunchRequest, line: CommandLine) -> None:
        self._words = line.words(without={Options.watch.flag})
        self._files, folders = WatchedFiles(), [check_folder()]
        if (own := file_of(request.program)) is not None:
            self._files.add(os.path.realpath(own))
            folders.append(os.path.dirname(os.path.realpath(own)))
        self._project = tuple(os.path.join(folder, "") for folder in folders)
        self._stop_signals, self._signum = request.stop_signals, 0
        # What a debugger has the terminal for: Ctrl-C, and no Ctrl-Z.
        self._debuggers = (signal.SIGINT, signal.SIGTSTP) if request.debug_rank is not None else ()
        self._signals = SignalQueue(
            request.stop_signals,
            even_if_ignored=request.stop_even_if_ignored,
            always=(
                *(signal.SIGQUIT, signal.SIGCHLD),
                *request.forwarded_signals,
                *self._debuggers,
            ),
        )

    def run(self) -> int:
        """Launch until a signal comes; return that as -n."""
        try:
            while not self._signum:
                code = self._launch()
                if code is not None and not self._signum:
                    self._wait_for_change(code)
        finally:
            self._signals.restore()
        return -self._signum

    def _launch(self) -> int | None:
        """Launch once; return the exit code, ``None`` if it was ended as a file has changed.

        Raises:
            MeshrunError: If it could not begin, whatever the program is.
        """
        with private_folder() as folder:
            noted, is_stopping = _Noted(os.path.join(folder, "files")), False
            own = {PARENT_PID: str(os.getpid()), PARENT_FOLDER: folder, WATCH: noted.path}
            self._files.changed()  # as of now
            process = subprocess.Popen(
                own_command("launcher", *self._words),
                env={**os.environ, **own},
                start_new_session=True,  # signals of the terminal come once, through this process
            )
            while process.poll() is None:
                self._wait(process)
                self._add(noted.take())
                if not is_stopping and (changed := self._files.changed()):
                    is_stopping = True
                    path = os.path.join(folder, WHY)
                    with suppress(OSError), open(path, "w", opener=open_private) as why:
                        why.write(_describe(changed))
                    process.terminate()
            self._add(noted.take())
            _tell_error(folder)
        if -process.returncode in self._debuggers:
            self._signum = -process.returncode
        return None if is_stopping else process.returncode

    def _wait_for_change(self, code: int) -> None:
        """Wait until a file changes, or after a failure one comes that may have been missing."""
        before, changed = self._files.beside(), list[str]()  # whoever reads the line may be quick
        end = f"exit code {code}" if code > 0 else f"ended by {signal_name(-code)}"
        files = count(len(self._files), "file")
        end = end if code else "finished"
        say(f"meshrun: {end}; waiting for a change in {files}; Ctrl-C ends meshrun")
        while not (changed or self._signum):
            self._wait(None)
            changed = self._files.changed()
            if code and not changed:
                changed = sorted(self._files.beside() - before)
        if changed:
            say(f"meshrun: {_describe(changed)}; launching again")

    def _wait(self, process: subprocess.Popen[bytes] | None) -> None:
        """Wait until something may have happened; pass signals on."""
        self._files.wait(lambda: bool(select.select([self._signals], [], [], 0)[0]))
        for signum in self._signals.take():
            if signum == signal.SIGCHLD:
                continue
            if process is not None:
                process.send_signal(signum)
            if signum in self._stop_signals and (process is None or signum not in self._debuggers):
                self._signum = self._signum or signum

    def _add(self, noted: Iterable[str]) -> None:
        """Watch what ranks have noted, but for libraries and what is elsewhere."""
        for line in noted:
            mtime_ns, _, path = line.partition(" ")
            real = os.path.realpath(path)
            if path.startswith(self._project) or real.startswith(self._project):
                self._files.add(real, int(mtime_ns))


class _Noted:
    """The list of files that ranks append to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._bytes = 0

    def take(self) -> list[str]:
        """Return what was appended since the last time."""
        try:
            with open(self.path, "rb", opener=open_private) as file:
                file.seek(self._bytes)
                whole, nul, _ = file.read().rpartition(b"\0")
        except FileNotFoundError:  # no rank has begun
            return []
        self._bytes += len(whole + nul)
        return [os.fsdecode(line) for line in whole.split(b"\0") if line]


def _describe(changed: Sequence[str]) -> str:
    folder = current_folder()
    first = os.path.relpath(changed[0], folder) if folder else changed[0]
    rest = len(changed) - 1
    return f"{first} and {count(rest, 'other file')} changed" if rest else f"{first} changed"


def _tell_error(folder: str) -> None:
    """Tell why a launch could not be made, if it could not.

    Raises:
        MeshrunError: If that is not for the program's sake, so that no change of it helps.
    """
    if not os.path.exists(error_file(folder)):
        return
    with open(error_file(folder), opener=open_private) as file:
        error = parse_error_json(file.read())
    if not isinstance(error, ProgramError):
        raise error
    say(render_error(error))
