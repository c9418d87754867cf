"""The private folder of warm servers, with a socket and a description of each."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from msgspec import Struct

from meshrun.host.folder import Folder
from meshrun.host.named_files import absolute, open_nonblocking, who_else_may_write
from meshrun.host.network import peer_of
from meshrun.host.process_state import started_at
from meshrun.host.processes import has_ended, open_pidfd, send_signal_to
from meshrun.plan.rank_program import Program
from meshrun.protocol.packing import pack, read_json, unpack
from meshrun.warm.identity import Mismatch, ServerDescription, changed_library, this_interpreter
from meshrun.warm.inherited import fixed_by_parent, process_namespace
from meshrun.worker.import_record import Stat

_ENDS_WITHIN_S = 30
_LOCK = "lock"
_SO_PEERPIDFD = 77
_REASON = "why"


class LiveServer(Struct, frozen=True):
    """A live server, and when it was last used, in seconds since the epoch."""

    server: ServerDescription
    used: float


class ServerFolder:
    """The folder of this user's servers on this machine."""

    def __init__(self, path: str) -> None:
        """Open the folder; create it if it does not exist.

        Raises:
            OSError: If it cannot be created, or another user may write to it.
        """
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise OSError(f"cannot create `{path}`: {error.strerror}") from None
        try:
            self._folder = Folder(path)
        except NotADirectoryError:
            raise PermissionError(f"`{path}` is not a folder") from None
        mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
        reason = None if self._folder.is_ours else "it belongs to another user"
        reason = reason or (f"its mode is {mode:o}, not 700" if mode & 0o077 else None)
        if reason := reason or who_else_may_write(os.path.dirname(path)):
            self._folder.close()
            raise PermissionError(f"`{path}` is not private: {reason}")
        self.path = path

    def servers(self) -> list[LiveServer]:
        """Return the live servers, the last used one first; remove the files of dead ones.

        Servers whose description cannot be read, as of another version of meshrun, are ignored, and
        so are those of other containers that share the folder.
        """
        found = []
        for pid, name in self._files("json"):
            server = self._read(name)
            if server is not None and server.fixed.get("pid namespace") != process_namespace():
                continue
            born = started_at(pid)
            if born is None or (server is not None and born != server.born):
                self.forget(pid)
            elif server is not None:
                with suppress(OSError):
                    found.append(LiveServer(server, os.stat(f"{self.path}/{name}").st_mtime))
        return sorted(found, key=lambda each: -each.used)

    def starting(self) -> list[int]:
        """Return the servers that are still importing."""
        found = []
        for pid, name in self._files("starting"):
            with suppress(OSError):
                namespace, _, born = self._text(name).partition(" ")
                if namespace != process_namespace():
                    continue
                if born == started_at(pid):
                    if self.describes(pid):  # it was ready before its launcher recorded its start
                        self._remove(name)
                    else:
                        found.append(pid)
                    continue
            self.forget(pid)
        return found

    def _files(self, kind: str) -> Iterator[tuple[int, str]]:
        """Yield (server, name) of each file with this ending."""
        for name in os.listdir(self.path):
            pid, _, ending = name.partition(".")
            if ending == kind and pid.isdecimal():
                yield int(pid), name

    def has(self, pid: int) -> bool:
        """Return whether a server is alive, importing or not."""
        return pid in (*self.starting(), *(found.server.pid for found in self.servers()))

    def record_start(self, pid: int) -> None:
        """Record a server that is still importing."""
        self._folder.write(f"{pid}.starting", f"{process_namespace()} {started_at(pid)}")

    def describe(self, server: ServerDescription, files: Mapping[str, Stat]) -> None:
        """Make a server available to runs, with the files that it has loaded."""
        self._folder.write(f"{server.pid}.files", json.dumps(files))
        self._folder.write(f"{server.pid}.json", pack(server).decode())
        self._remove(f"{server.pid}.starting")

    def describes(self, pid: int) -> bool:
        """Return whether the description of a server still exists."""
        return os.path.exists(f"{self.path}/{pid}.json")

    def watch(self) -> None:
        """Have the kernel send SIGIO to this process whenever a file is removed from the folder.

        Source:
            ``F_NOTIFY``, fcntl(2); few kernels are built without it.
        """
        with suppress(OSError):
            fcntl.fcntl(self._folder, fcntl.F_NOTIFY, fcntl.DN_DELETE | fcntl.DN_MULTISHOT)

    def changed_library(self, server: ServerDescription) -> Mismatch | None:
        """Return which of a server's libraries has changed, or ``None``."""
        try:
            return changed_library(read_json(self._text(f"{server.pid}.files")))
        except (OSError, ValueError, TypeError, AttributeError):
            return Mismatch("the list of its files cannot be read", is_permanent=True)

    def record_use(self, pid: int) -> None:
        """Record that a server is used now."""
        with suppress(OSError):
            os.utime(f"{self.path}/{pid}.json")

    def forget(self, pid: int) -> None:
        """Remove the files of a server."""
        for kind in ("starting", "json", "files", "sock"):
            self._remove(f"{pid}.{kind}")

    def listen(self) -> socket.socket:
        """Return the socket on which this process, a server, listens."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._socket(os.getpid()))
        listener.listen(socket.SOMAXCONN)
        return listener

    def connect(self, pid: int, timeout_s: float) -> socket.socket:
        """Return a connection to a server.

        Raises:
            OSError: If the server does not accept it in time, or is not :func:`is_as_privileged`.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self._socket(pid))
            if not is_as_privileged(connection):
                raise PermissionError("what listens there is not a warm server for this launcher")
        except OSError:
            connection.close()
            raise
        return connection

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock with which servers start one by one, so that no two are equal."""
        descriptor = self._folder.open(f"{self.path}/{_LOCK}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def imports_file(self, program: Program) -> str:
        """Return the file for what a run of a program by this interpreter imports."""
        target = program.target if program.kind == "module" else absolute(program.target)
        key = f"{this_interpreter()} {program.kind} {target}"
        name = hashlib.blake2b(os.fsencode(key), digest_size=8).hexdigest()
        return f"{self.path}/imports-{name}"

    def leave_reason(self, reason: str) -> None:
        """Record for the next run why this one leaves no server, if there is room for that."""
        with suppress(OSError):
            self._folder.write(_REASON, reason)

    def take_reason(self) -> str | None:
        """Return why the last run left no server, and forget it."""
        try:
            reason = self._text(_REASON)
            os.unlink(f"{self.path}/{_REASON}")
        except OSError:
            return None
        return reason

    def remove(self) -> None:
        """Remove the folder and everything in it."""
        self._folder.remove()
        self.close()

    def close(self) -> None:
        """Close the folder's descriptor."""
        self._folder.close()

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(f"{self.path}/{name}")

    def _text(self, name: str) -> str:
        with open(f"{self.path}/{name}", "rb", opener=open_nonblocking) as file:
            return file.read().decode(errors="surrogateescape")

    def _read(self, name: str) -> ServerDescription | None:
        try:
            server: ServerDescription = unpack(self._text(name), ServerDescription)
        except (OSError, ValueError):
            return None
        return server if f"{server.pid}.json" == name else None

    def _socket(self, pid: int) -> str:
        # The address of a socket has at most 107 bytes; the folder's path may be longer.
        return f"/proc/self/fd/{self._folder.fileno()}/{pid}.sock"


def is_as_privileged(connection: socket.socket) -> bool:
    """Return whether the peer is a process of this user's with the same privileges.

    One with fewer, as in a sandbox that shares this folder, could run programs with the privileges
    of a server, or receive the environment of a launcher.
    """
    peer = peer_of(connection)
    if peer is None or peer[1] != os.geteuid():
        return False
    try:
        pidfd = _peer_pidfd(connection, peer[0])
    except OSError:  # it has ended, or has no process id here
        return False
    try:
        # If it has ended, another process may have its id.
        return fixed_by_parent(peer[0]) == fixed_by_parent() and not has_ended(pidfd)
    except OSError:
        return False
    finally:
        os.close(pidfd)


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    """Return a pidfd of the peer, which refers to it even if its id is reused.

    Source:
        ``SO_PEERPIDFD``, from Linux 6.5 on; ``include/uapi/asm-generic/socket.h``.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return open_pidfd(pid)


def default_server_folder() -> str:
    """Return the folder of this user's servers, in the login session's runtime folder or /tmp."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(session) and os.path.isdir(session):
        return os.path.join(session, "meshrun")
    return os.path.join(tempfile.gettempdir(), f"meshrun-{os.geteuid()}")


def stop_server(folder: ServerFolder, pid: int) -> bool:
    """Kill a server and wait for its end; runs that it has started continue.

    Returns:
        Whether it has ended.
    """
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        folder.forget(pid)
        return True
    try:
        if not folder.has(pid):  # it has ended, and the pidfd may refer to another process
            return True
        send_signal_to(pidfd, signal.SIGKILL)
        return has_ended(pidfd, within_s=_ENDS_WITHIN_S)
    finally:
        os.close(pidfd)
        folder.forget(pid)
