"""The private folder in which warm servers are found: a socket and a description of each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from meshrun.host.folder import Folder, who_else_may_write
from meshrun.host.processes import started_at
from meshrun.host.sockets import peer_of
from meshrun.host.whole_file import open_nonblocking
from meshrun.plan.rank_program import Program
from meshrun.protocol.packing import convert, read_json
from meshrun.warm.identity import Mismatch, Server, changed_library, this_interpreter
from meshrun.warm.inherited import fixed_by_parent, process_namespace
from meshrun.worker.learnt import Stat

_ENDS_WITHIN_S = 30
_LOCK = "lock"
_SO_PEERPIDFD = 77
_WHY = "why"


@dataclass(frozen=True, slots=True)
class Found:
    """A server that is alive, and when it was last used, in seconds since the epoch."""

    server: Server
    used: float


class Place:
    """The folder of this user's servers on this machine."""

    def __init__(self, path: str) -> None:
        """Hold it, and make it if it is not there.

        Raises:
            OSError: If it cannot be made, or could be another user's.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self._folder = Folder(path)
        mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
        why = None if self._folder.is_ours else "it belongs to another user"
        why = why or (f"its mode is {mode:o}, not 700" if mode & 0o077 else None)
        if why := why or who_else_may_write(os.path.dirname(path)):
            self._folder.close()
            raise PermissionError(f"`{path}` is not private: {why}")
        self.path = path

    def servers(self) -> list[Found]:
        """Return the servers that are alive, the one used last first; forget the others.

        Those of another version may describe themselves otherwise, and are left alone; so are those
        of another container that has the same folder.
        """
        found = []
        for name in os.listdir(self.path):
            pid, _, kind = name.partition(".")
            if kind != "json" or not pid.isdecimal():
                continue
            server = self._read(name)
            if server is not None and server.fixed.get("pid namespace") != process_namespace():
                continue
            born = started_at(int(pid))
            if born is None or (server is not None and born != server.born):
                self.forget(int(pid))
            elif server is not None:
                with contextlib.suppress(OSError):
                    found.append(Found(server, os.stat(f"{self.path}/{name}").st_mtime))
        return sorted(found, key=lambda each: -each.used)

    def starting(self) -> list[int]:
        """Return the servers that are still importing."""
        found = []
        for name in os.listdir(self.path):
            pid, _, kind = name.partition(".")
            if kind == "starting" and pid.isdecimal():
                with contextlib.suppress(OSError):
                    namespace, _, born = self._text(name).partition(" ")
                    if namespace != process_namespace():
                        continue
                    if born == started_at(int(pid)):
                        found.append(int(pid))
                        continue
                self.forget(int(pid))
        return found

    def has(self, pid: int) -> bool:
        """Whether a server is alive, importing or not."""
        return pid in (*self.starting(), *(found.server.pid for found in self.servers()))

    def begin(self, pid: int) -> None:
        """Have a server known as one that is still importing."""
        self.write(f"{pid}.starting", f"{process_namespace()} {started_at(pid)}")

    def describe(self, server: Server, files: Mapping[str, Stat]) -> None:
        """Have it found from now on, with the files that it has loaded."""
        self.write(f"{server.pid}.files", json.dumps(files))
        self.write(f"{server.pid}.json", json.dumps(asdict(server)))
        self._remove(f"{server.pid}.starting")

    def knows(self, pid: int) -> bool:
        """Whether a server that has described itself can still be found."""
        return os.path.exists(f"{self.path}/{pid}.json")

    def watch(self) -> None:
        """Have this process get SIGIO whenever something is removed from the folder.

        Source:
            ``F_NOTIFY``, fcntl(2); few kernels are built without it.
        """
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._folder, fcntl.F_NOTIFY, fcntl.DN_DELETE | fcntl.DN_MULTISHOT)

    def changed_library(self, server: Server) -> Mismatch | None:
        """Return why its libraries are no longer those that a new interpreter would import."""
        try:
            return changed_library(read_json(self._text(f"{server.pid}.files")))
        except (OSError, ValueError, TypeError, AttributeError):
            return Mismatch("the list of its files cannot be read", is_forever=True)

    def note_use(self, pid: int) -> None:
        """Note that a server was used now."""
        with contextlib.suppress(OSError):
            os.utime(f"{self.path}/{pid}.json")

    def forget(self, pid: int) -> None:
        """Remove the files of a server."""
        for kind in ("starting", "json", "files", "sock"):
            self._remove(f"{pid}.{kind}")

    def listen(self) -> socket.socket:
        """Return the socket of this process as a server."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._socket(os.getpid()))
        listener.listen(socket.SOMAXCONN)
        return listener

    def connect(self, pid: int, timeout_s: float) -> socket.socket:
        """Return a connection to a server.

        Raises:
            OSError: If there is none, it does not accept it in time, or it is not :func:`is_alike`.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self._socket(pid))
            if not is_alike(connection):
                raise PermissionError("what listens there is no warm server of this launcher's")
        except OSError:
            connection.close()
            raise
        return connection

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Start one server at a time, so that two runs do not leave two of the same."""
        descriptor = self._folder.open(f"{self.path}/{_LOCK}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def learnt(self, program: Program) -> str:
        """Return the file in which a run of a program by this interpreter says what it imported."""
        target = program.target if program.kind == "module" else os.path.abspath(program.target)
        what = f"{this_interpreter()} {program.kind} {target}"
        name = hashlib.blake2b(os.fsencode(what), digest_size=8).hexdigest()
        return f"{self.path}/learnt-{name}"

    def say_why(self, reason: str) -> None:
        """Leave word for the next run why no server was left."""
        self.write(_WHY, reason)

    def take_why(self) -> str | None:
        """Return why the last run left no server, once."""
        try:
            reason = self._text(_WHY)
            os.unlink(f"{self.path}/{_WHY}")
        except OSError:
            return None
        return reason

    def write(self, name: str, text: str) -> None:
        """Write a file of it, whole or not at all."""
        temporary = f"{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(self._folder.open(f"{self.path}/{temporary}", flags), "w") as file:
                file.write(text)
            self._folder.rename(temporary, name)
        except OSError:
            self._remove(temporary)
            raise

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        self._folder.remove()
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        self._folder.close()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}/{name}")

    def _text(self, name: str) -> str:
        with open(f"{self.path}/{name}", opener=open_nonblocking) as file:
            return file.read()

    def _read(self, name: str) -> Server | None:
        try:
            server: Server = convert(Server, read_json(self._text(name)))
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return None
        return server if f"{server.pid}.json" == name else None

    def _socket(self, pid: int) -> str:
        # An address has at most 107 bytes, and a path may be longer.
        return f"/proc/self/fd/{self._folder.fileno()}/{pid}.sock"


def is_alike(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user's that may do what this one may.

    One with fewer privileges, as in a sandbox that shows this folder, could have programs run with
    those of a server, or be handed the environment of a launcher.
    """
    peer = peer_of(connection)
    if peer is None or peer[1] != os.geteuid():
        return False
    try:
        process = _process_behind(connection, peer[0])
    except OSError:  # it has ended, or has no process id here
        return False
    try:
        # One that has ended left its id to another process.
        return fixed_by_parent(peer[0]) == fixed_by_parent() and not _has_ended(process)
    except OSError:
        return False
    finally:
        os.close(process)


def _process_behind(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the process at the other end, so that its id stays its own.

    Source:
        ``SO_PEERPIDFD``, from Linux 6.5 on; ``include/uapi/asm-generic/socket.h``.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return os.pidfd_open(pid)


def _has_ended(process: int) -> bool:
    """Whether the process of a descriptor has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def usual_place() -> str:
    """Return where this user's servers are: where the login session keeps such things, or /tmp."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(session) and os.path.isdir(session):
        return os.path.join(session, "meshrun")
    return os.path.join(tempfile.gettempdir(), f"meshrun-{os.geteuid()}")


def stop_server(place: Place, pid: int) -> bool:
    """Kill a server and wait for its end; runs that it began continue.

    Returns:
        Whether it has ended.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        place.forget(pid)
        return True
    try:
        if not place.has(pid):  # nobody else has taken its id since
            return True
        signal.pidfd_send_signal(process, signal.SIGKILL)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(_ENDS_WITHIN_S * 1000))
    finally:
        os.close(process)
        place.forget(pid)
