"""The launcher's side of warm servers: finds one for a run, and leaves one for the next."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec import Struct

from meshrun.host.descriptors import unnamed_file
from meshrun.host.named_files import absolute
from meshrun.host.own_variables import LAUNCH_MARK
from meshrun.host.process_state import is_stopped
from meshrun.host.processes import EndedChildren, has_ended, send_signal_to
from meshrun.host.reactor import Steps, finish
from meshrun.host.users_files import is_installed
from meshrun.plan.plan import LaunchPlan
from meshrun.plan.rank_env import zygote_environment
from meshrun.plan.rank_program import BASE, first_path
from meshrun.protocol.packing import pack, unpack
from meshrun.start import own_command
from meshrun.warm.identity import Mismatch, Requirements, ServerDescription, find_mismatch
from meshrun.warm.inherited import leader_of_session, read_inherited, why_unsupported
from meshrun.warm.server_folder import ServerFolder, default_server_folder, stop_server
from meshrun.warm.warm_messages import ServerSpec, ZygoteEnded, ZygoteForked, ZygoteSpec
from meshrun.wording import duration
from meshrun.worker.early_settings import EarlySettings
from meshrun.worker.import_record import ImportRecord, read_import_record
from meshrun.worker.imports import holds, on_path
from meshrun.worker.program import inspect_program
from meshrun.zygote.control import killing_marked

_ANSWERS_WITHIN_S = 10.0
_BETWEEN_LOOKS_S = 0.005
"""Steps wait for times only, not for sockets, and the shim may be stopped again."""
_KILL_TAKES_S = 30.0
"""How long a shim may take to report the end of a zygote that was killed, and of all below it."""
_PACKET_BYTES = 64 * 1024
_PIDFDS = 2
"""The shim sends pidfds of the zygote and of itself."""
_TITLE = " " * 200
"""Room for the titles of the processes that are forked from a server."""
_NO_MARK = "0" * 16
_FromShim = ZygoteForked | ZygoteEnded
_STARTING_FRESH = "starting fresh, not from the warm server"


class WarmZygote(Struct):
    """A zygote that a warm server has forked."""

    pid: int
    _pidfd: int
    _shim: socket.socket
    _shim_pidfd: int
    _mark: str
    _dead_by_s: float = math.inf
    """When nothing should be left after SIGKILL."""

    def kill(self) -> None:
        """Kill the zygote; the kernel then kills its ranks."""
        _send_signal(self._pidfd, signal.SIGKILL)
        self._dead_by_s = min(self._dead_by_s, time.monotonic() + _KILL_TAKES_S)

    def ending(self) -> Steps[tuple[int, EndedChildren]]:
        """Wait until nothing of it is left; return its wait status, and what could not be ended."""
        ended = yield from self._receive()
        with suppress(OSError):
            self._shim.send(b"\0")  # this launcher is alive, and ends what is left itself
            yield from self._receive()  # the connection closes
        if not isinstance(ended, ZygoteEnded):  # the shim was killed, or still waits
            self.kill()
            yield from killing_marked(self._mark)
            survivors = [] if has_ended(self._pidfd) else [self.pid]
            ended = ZygoteEnded(wait_status=signal.SIGKILL, survivors=survivors, denied=[])
        self._shim.close()
        os.close(self._pidfd)
        os.close(self._shim_pidfd)
        return ended.wait_status, EndedChildren(0, tuple(ended.survivors), tuple(ended.denied))

    def _receive(self) -> Steps[_FromShim | None]:
        """Return the shim's next message, ``None`` at its end; wake it if it is stopped."""
        while time.monotonic() <= self._dead_by_s:
            with suppress(BlockingIOError):
                return _receive(self._shim)[0]
            _send_signal(self._shim_pidfd, signal.SIGCONT)
            yield _BETWEEN_LOOKS_S
        return None


class WarmRun:
    """A run of a program from a warm server, if there is one; if not, it leaves one behind.

    A new server waits for ``idle_s`` for the next run.
    """

    def __init__(self, plan: LaunchPlan, *, idle_s: float, note: Callable[[str], None]) -> None:
        program, self._preload = plan.program, plan.request.preload
        self._program = program
        self._idle_s, self._note = idle_s, note
        self._folder: ServerFolder | None = None
        self._settings = EarlySettings()
        self._used = 0
        """The process id of the server that this run was started from; 0 for none."""
        if (reason := why_unsupported()) is not None:
            note(f"--warm needs {reason}; starting without it")
            return
        try:
            self._folder = ServerFolder(default_server_folder())
            with on_path(first_path(program)):
                self._settings = inspect_program(program).settings
        except (OSError, SyntaxError, ValueError, SystemExit) as error:
            if self._folder is None:
                note(f"--warm has no effect: {error}")
            return  # the zygote reports what is wrong with the program
        if (unclear := self._settings.first_unclear()) is not None:
            note(f"--warm has no effect: {unclear} to a value known only at run time")
            self._folder = None

    @property
    def imports_file(self) -> str:
        """The file to which a rank writes what it imported; "" for none."""
        if self._folder is None or self._program.target.startswith("meshrun."):
            return ""
        return self._folder.imports_file(self._program)

    def start_zygote(
        self, fds: Sequence[int], *, mark: str, stdin: int | None
    ) -> WarmZygote | None:
        """Make a server fork a zygote; ``None`` if no server equals a fresh start.

        Args:
            fds: The zygote's ends of the control and reports sockets, and the file of its stacks.
            mark: The mark of the launch.
            stdin: ``DEVNULL`` for no standard input, ``None`` for this process's.
        """
        try:
            server = self._find()
        except OSError:  # the folder has been removed
            return None
        if server is None:
            return None
        spec = ZygoteSpec(
            program=self._program,
            mark=mark,
            inherited=read_inherited(zygote_environment(os.environ)),
        )
        try:
            with open(os.devnull, "rb") as null:
                standard = 0 if stdin is None else null.fileno()
                answer = self._request(server, spec, (standard, 1, 2, *fds))
        except (OSError, ValueError):
            answer = None
        if isinstance(answer, WarmZygote):
            self._used = server.pid
            return answer
        if answer is None:
            self._note(f"the warm server (process {server.pid}) did not answer; starting fresh")
        else:
            self._note(f"{_STARTING_FRESH}: {answer.reason}")
        return None

    def leave_server(self) -> None:
        """Start a server for the next run of this program, unless there is one or no torch."""
        if self._folder is None or importlib.util.find_spec("torch") is None:
            return
        try:
            self._leave_server(self._folder)
        except OSError as error:
            self._note(f"no warm server was left in `{self._folder.path}`: {error.strerror}")

    def _leave_server(self, folder: ServerFolder) -> None:
        required = self._requirements()
        for found in folder.servers():
            mismatch = find_mismatch(found.server, required)
            if mismatch is None and found.server.pid != self._used:  # which was checked before
                mismatch = folder.changed_library(found.server)
            if mismatch is None:
                return
            if mismatch.is_permanent:
                stop_server(folder, found.server.pid)
        spec = ServerSpec(
            folder=folder.path,
            required=required,
            unfit=self._unfit_file(),
            idle_s=self._idle_s,
            session=leader_of_session(os.getpid()),
        )
        with _in_file(pack(spec)) as text:
            process = subprocess.Popen(
                own_command("warm-server", str(text), _TITLE, unbuffered=True),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(text,),
                start_new_session=True,
                cwd="/",
                env={**required.environment, LAUNCH_MARK: _NO_MARK},
            )
        try:
            folder.record_start(process.pid)
        except OSError:
            process.kill()
            raise
        process.returncode = 0  # nobody waits for it
        self._note(
            f"leaving a warm server for the next run; it ends after {duration(self._idle_s)} idle"
        )

    # ---- finding a server ------------------------------------------------------------------

    def _find(self) -> ServerDescription | None:
        """Return the matching server; whether its libraries have changed is checked as it forks."""
        if self._folder is None or holds(first_path(self._program), BASE):
            return None
        required = self._requirements()
        near: list[tuple[int, str]] = []
        for found in self._folder.servers():
            mismatch = find_mismatch(found.server, required)
            if mismatch is None and is_stopped(found.server.pid):
                self._note(
                    f"starting fresh: the warm server (process {found.server.pid}) is stopped"
                )
                return None
            if mismatch is None:
                return found.server
            if mismatch.distance is not None:
                near.append((mismatch.distance, mismatch.reason))
        if near:
            self._note(f"{_STARTING_FRESH}: {min(near)[1]}")
        elif self._folder.starting():
            self._note("starting fresh: the warm server is still importing")
        elif reason := self._folder.take_reason():
            self._note(f"starting fresh: the last run left no warm server: {reason}")
        return None

    def _requirements(self) -> Requirements:
        record = self._import_record()
        environment = {**zygote_environment(os.environ), **self._settings.values}
        known = {name: value for name, value in environment.items() if value is not None}
        if path := known.get("PYTHONPATH"):  # for any folder in which the interpreter is started
            known["PYTHONPATH"] = os.pathsep.join(map(absolute, path.split(os.pathsep)))
        return Requirements(
            modules=list(dict.fromkeys((*self._installed_preload(), *record.modules))),
            environment=known,
            own_files=record.own_files,
            changed=record.changed,
        )

    def _import_record(self) -> ImportRecord:
        """Return what the program imported, unless forks of a process with it cannot run it."""
        nothing = ImportRecord(modules=[], changed=[], own_files=[])
        if not self.imports_file:
            return nothing
        record = read_import_record(self.imports_file) or nothing
        unfit = self._unfit_file()
        with suppress(OSError):
            unfit_ns = os.stat(unfit).st_mtime_ns
            if all(os.stat(path).st_mtime_ns < unfit_ns for path in record.own_files):
                return nothing
            os.unlink(unfit)
        is_shadowed = holds(first_path(self._program), record.modules)
        return nothing if is_shadowed else record

    def _unfit_file(self) -> str:
        return f"{self.imports_file}.unfit" if self.imports_file else ""

    def _installed_preload(self) -> Iterator[str]:
        """Yield the modules to share that are installed; the user's own may change."""
        for name in self._preload:
            with suppress(Exception):
                spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
                if spec is not None and is_installed(spec.origin):
                    yield name

    # ---- forking a zygote ------------------------------------------------------------------

    def _request(
        self, server: ServerDescription, spec: ZygoteSpec, fds: Sequence[int]
    ) -> WarmZygote | Mismatch | None:
        """Return the zygote that a server forks, the library that has changed, or neither."""
        assert self._folder is not None  # noqa: S101
        connection = self._folder.connect(server.pid, _ANSWERS_WITHIN_S)
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _in_file(pack(spec)) as text:
                socket.send_fds(connection, [b"\0"], [text, folder, *fds])
            mismatch = self._folder.changed_library(server)
            forked, pidfds = _receive(connection)
            if not isinstance(forked, ZygoteForked) or len(pidfds) != _PIDFDS:
                for pidfd in pidfds:
                    os.close(pidfd)
                connection.close()
                return mismatch
            connection.setblocking(False)
            pidfd, shim_pidfd = pidfds
            zygote = WarmZygote(forked.pid, pidfd, connection, shim_pidfd, spec.mark)
            if mismatch is not None:
                zygote.kill()
                finish(zygote.ending())
            return mismatch or zygote
        except OSError:
            connection.close()
            raise
        finally:
            os.close(folder)


def _send_signal(pidfd: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        send_signal_to(pidfd, signum)


def _receive(connection: socket.socket) -> tuple[_FromShim | None, list[int]]:
    try:
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET_BYTES, _PIDFDS)
        return (unpack(packet, _FromShim) if packet else None), fds
    except (ConnectionError, ValueError):
        return None, []


@contextmanager
def _in_file(text: bytes) -> Iterator[int]:
    """Yield a descriptor of a file without a path that contains a text."""
    with open(unnamed_file("meshrun"), "wb") as file:
        file.write(text)
        file.flush()
        file.seek(0)
        yield file.fileno()
