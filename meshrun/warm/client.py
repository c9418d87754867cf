"""The launcher's side of warm servers: finds one for a run, has it fork, and leaves one behind."""

from __future__ import annotations

import importlib.machinery
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from meshrun.host.processes import Ended, is_stopped
from meshrun.host.users_files import is_installed
from meshrun.plan.rank_env import zygote_environment
from meshrun.plan.rank_program import Program
from meshrun.start import own_command
from meshrun.warm.identity import Mismatch, Server, Wanted, mismatch, this_interpreter
from meshrun.warm.inherited import fixed_by_parent, is_supported, read_inherited
from meshrun.warm.place import Place, stop_server, usual_place
from meshrun.warm.session import leader_of_session
from meshrun.warm.warm_messages import (
    Assignment,
    Charge,
    Dismiss,
    Message,
    StartZygote,
    ZygoteEnded,
    ZygoteForked,
    decode,
    encode,
)
from meshrun.wording import duration
from meshrun.worker.early_settings import EarlySettings, is_read_at_import
from meshrun.worker.learnt import Learnt, read_learnt
from meshrun.worker.program import read_program
from meshrun.worker.sys_path import first_path, holds, on_path
from meshrun.zygote.guard import LAUNCH_MARK, kill_marked

_ANSWERS_WITHIN_S = 10.0
_WOKEN_EVERY_S = 0.2
_PACKET = 64 * 1024
_PROCESSES = 2
"""Whose descriptors the keeper sends: the zygote's and its own."""
_TITLE = " " * 200
"""Room for the titles of the processes that are forked from a server."""
_NO_MARK = "0" * 16
_NOT_FROM_IT = "starting fresh, not from the warm server"


@dataclass(frozen=True, slots=True)
class WarmZygote:
    """A zygote that a warm server has forked, as its keeper describes it."""

    pid: int
    _process: int
    """A descriptor of it."""
    _keeper: socket.socket
    _keeper_process: int
    _mark: str

    def kill(self) -> None:
        """End it at once; the kernel ends its ranks."""
        _send_signal(self._process, signal.SIGKILL)

    def wait(self) -> tuple[int, Ended]:
        """Wait until nothing of it is left; return its wait status, and what could not be ended."""
        ended = self._hear()
        with suppress(OSError):
            self._keeper.send(encode(Dismiss()))
            self._hear()  # its end
        if not isinstance(ended, ZygoteEnded):  # the keeper was killed
            self.kill()
            kill_marked(self._mark)
            ended = ZygoteEnded(wait_status=signal.SIGKILL, survivors=[], denied=[])
        self._keeper.close()
        os.close(self._process)
        os.close(self._keeper_process)
        return ended.wait_status, Ended(0, tuple(ended.survivors), tuple(ended.denied))

    def _hear(self) -> Message | None:
        """Return what the keeper says, ``None`` at its end; one that was stopped is woken."""
        while True:
            with suppress(TimeoutError):
                return _receive(self._keeper)[0]
            _send_signal(self._keeper_process, signal.SIGCONT)


class WarmRun:
    """A run of a program from a warm server, if there is one; if not, it leaves one behind.

    Args:
        program: What ranks run.
        preload: Modules that they share.
        idle_s: How long a server that is left waits for the next run.
        note: Tells the user.
    """

    def __init__(
        self,
        program: Program,
        preload: Sequence[str],
        *,
        idle_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._program, self._preload, self._idle_s, self._note = program, preload, idle_s, note
        self._place: Place | None = None
        self._settings = EarlySettings()
        self._used = 0
        """The process id of the server that this run is from; 0 for none."""
        if not is_supported():
            note("--warm needs Linux; starting without it")
            return
        try:
            self._place = Place(usual_place())
            with on_path(first_path(program)):
                self._settings = read_program(program).settings
        except (OSError, SyntaxError, ValueError, SystemExit) as error:
            if self._place is None:
                note(f"--warm has no effect: {error}")
            return  # else the zygote will say what is wrong with the program
        for name, where in self._settings.unclear.items():
            if is_read_at_import(name):
                note(f"--warm has no effect: {where} sets {name} to a value known only at run time")
                self._place = None

    @property
    def learn_to(self) -> str:
        """Return the file in which a rank says at its end what it imported; "" for none."""
        if self._place is None or self._program.target.startswith("meshrun."):
            return ""
        return self._place.learnt(self._program)

    def start_zygote(
        self, fds: Sequence[int], *, mark: str, stdin: int | None
    ) -> WarmZygote | None:
        """Have a server fork a zygote; ``None`` if there is none that is as good as a fresh start.

        Args:
            fds: The zygote's ends of control and reports, and the file of its stacks.
            mark: Of the launch.
            stdin: Its standard input, as for ``subprocess``; this process's if ``None``.
        """
        try:
            server = self._find()
        except OSError:  # the folder has been removed
            return None
        if server is None:
            return None
        charge = Charge(
            kind=self._program.kind,
            target=self._program.target,
            args=list(self._program.args),
            mark=mark,
            inherited=read_inherited(zygote_environment(os.environ)),
        )
        try:
            with _standard_input(stdin) as opened:
                answer = self._ask(server, charge, (opened, 1, 2, *fds))
        except (OSError, ValueError):
            answer = None
        if isinstance(answer, WarmZygote):
            self._used = server.pid
            return answer
        if answer is None:
            self._note(f"the warm server (process {server.pid}) did not answer; starting fresh")
        else:
            self._note(f"{_NOT_FROM_IT}: {answer.why}")
        return None

    def leave_server(self) -> None:
        """See to it that the next run of this program finds a server."""
        if self._place is None:
            return
        try:
            self._leave_server(self._place)
        except OSError as error:
            self._note(f"no warm server was left: {error.strerror}")

    def _leave_server(self, place: Place) -> None:
        wanted = self._wanted()
        for found in place.servers():
            unlike = mismatch(found.server, wanted)
            if unlike is None and found.server.pid != self._used:  # else it has been looked at
                unlike = place.changed_library(found.server)
            if unlike is None:
                return
            if unlike.is_forever:
                stop_server(place, found.server.pid)
        learnt = self._learnt()
        assignment = Assignment(
            place=place.path,
            modules=list(wanted.modules),
            own_files=learnt.own_files,
            changed=learnt.changed,
            refused=self._refusal(),
            environment=dict(wanted.environment),
            idle_s=self._idle_s,
            session=leader_of_session(os.getpid()),
        )
        with _in_memory(encode(assignment)) as text:
            process = subprocess.Popen(
                own_command("warm-server", str(text), _TITLE, unbuffered=True),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(text,),
                start_new_session=True,
                cwd="/",
                env={**wanted.environment, LAUNCH_MARK: _NO_MARK},
            )
        process.returncode = 0  # which nobody waits for
        place.begin(process.pid)
        self._note(
            f"leaving a warm server for the next run; it ends after {duration(self._idle_s)} idle"
        )

    # ---- finding one -----------------------------------------------------------------------

    def _find(self) -> Server | None:
        """Return the server that is asked to fork, whose libraries are looked at meanwhile."""
        if self._place is None:
            return None
        wanted = self._wanted()
        near: list[tuple[int, str]] = []
        for found in self._place.servers():
            unlike = mismatch(found.server, wanted)
            if unlike is None and is_stopped(found.server.pid):
                self._note(
                    f"starting fresh: the warm server (process {found.server.pid}) is stopped"
                )
                return None
            if unlike is None:
                return found.server
            if unlike.distance is not None:
                near.append((unlike.distance, unlike.why))
        if near:
            self._note(f"{_NOT_FROM_IT}: {min(near)[1]}")
        elif why := self._place.take_why():
            self._note(f"starting fresh: no warm server was left: {why}")
        return None

    def _wanted(self) -> Wanted:
        learnt = self._learnt()
        environment = {**zygote_environment(os.environ), **self._settings.values}
        return Wanted(
            interpreter=this_interpreter(),
            fixed=fixed_by_parent(),
            modules=tuple(dict.fromkeys((*self._installed_preload(), *learnt.modules))),
            environment=_absolute(
                {name: value for name, value in environment.items() if value is not None}
            ),
            own_files=learnt.own_files,
            changed=learnt.changed,
        )

    def _learnt(self) -> Learnt:
        """Return what the program imported, if forks of a process that did can run it."""
        nothing = Learnt(modules=[], changed=[], own_files=[])
        if not self.learn_to:
            return nothing
        learnt = read_learnt(self.learn_to) or nothing
        refusal = self._refusal()
        with suppress(OSError):
            refused_ns = os.stat(refusal).st_mtime_ns
            if all(os.stat(path).st_mtime_ns < refused_ns for path in learnt.own_files):
                return nothing
            os.unlink(refusal)
        is_shadowed = holds(first_path(self._program), learnt.modules)
        return nothing if is_shadowed else learnt

    def _refusal(self) -> str:
        return f"{self.learn_to}.refused" if self.learn_to else ""

    def _installed_preload(self) -> Iterator[str]:
        """Yield what was named to be shared and is not the user's own, which may change."""
        for name in self._preload:
            with suppress(Exception):
                spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
                if spec is not None and is_installed(spec.origin):
                    yield name

    # ---- asking it -------------------------------------------------------------------------

    def _ask(
        self, server: Server, charge: Charge, fds: Sequence[int]
    ) -> WarmZygote | Mismatch | None:
        """Have a server fork; return the zygote, or which library changed, or neither."""
        assert self._place is not None  # noqa: S101
        connection = self._place.connect(server.pid, _ANSWERS_WITHIN_S)
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _in_memory(encode(charge)) as text:
                socket.send_fds(connection, [encode(StartZygote())], [text, folder, *fds])
            unlike = self._place.changed_library(server)
            forked, processes = _receive(connection)
            if not isinstance(forked, ZygoteForked) or len(processes) != _PROCESSES:
                for process in processes:
                    os.close(process)
                connection.close()
                return unlike
            connection.settimeout(_WOKEN_EVERY_S)
            process, keeper = processes
            zygote = WarmZygote(forked.pid, process, connection, keeper, charge.mark)
            if unlike is not None:
                zygote.kill()
                zygote.wait()
            return unlike or zygote
        except OSError:
            connection.close()
            raise
        finally:
            os.close(folder)


def _send_signal(process: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signum)


def _receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    try:
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET, _PROCESSES)
        return (decode(packet) if packet else None), fds
    except (ConnectionError, ValueError):
        return None, []


def _absolute(environment: dict[str, str]) -> dict[str, str]:
    """Return variables that mean the same in whatever folder the interpreter is started."""
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return environment


@contextmanager
def _standard_input(stdin: int | None) -> Iterator[int]:
    if stdin != subprocess.DEVNULL:
        yield 0 if stdin is None else stdin
        return
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        yield null
    finally:
        os.close(null)


@contextmanager
def _in_memory(text: bytes) -> Iterator[int]:
    """Give a descriptor of a file without a name that holds a text."""
    with open(os.memfd_create("meshrun"), "wb") as file:
        file.write(text)
        file.flush()
        file.seek(0)
        yield file.fileno()
