"""A warm server: imports libraries once, then forks a zygote for each run that requests one.

    ASSIGNMENT_FD

It belongs to no launch, opens no terminal, and is single-threaded as every zygote is. It ends after
some time without a run, with the login sessions that used it, or on SIGTERM.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from meshrun.host.network import peer_of
from meshrun.host.own_variables import LAUNCH_MARK
from meshrun.host.process_state import started_at
from meshrun.host.processes import EnvironVariable, open_pidfd, set_title, signals_blocked
from meshrun.host.reactor import Reactor
from meshrun.host.users_files import module_files
from meshrun.plan.rank_program import BASE
from meshrun.protocol.packing import unpack
from meshrun.warm import identity
from meshrun.warm.inherited import fixed_by_parent, leader_of_session
from meshrun.warm.server_folder import ServerFolder, is_as_privileged, stop_server
from meshrun.warm.shim import serve_connection
from meshrun.warm.warm_messages import ServerSpec
from meshrun.worker.exit import ExitHandler
from meshrun.worker.import_record import is_own, stat_of
from meshrun.zygote.fork_safety import ImportWatch, nvml_based_cuda_check
from meshrun.zygote.main import run_zygote

_HANDLED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGIO}
_STARTS_WITHIN_S = 600
MOST_SERVERS = 4
"""Each takes about as much memory as the libraries that it has imported."""


def main(known_at_start: frozenset[str]) -> Callable[[], object]:
    """Serve; return only in a process that was forked for a run, with the function to run."""
    with open(int(sys.argv[1]), "rb") as file:
        spec: ServerSpec = unpack(file.read(), ServerSpec)
    set_title("warm-server")
    server = WarmServer(spec, known_at_start)
    return server.serve()


class WarmServer:
    """This process: imports modules, then forks shims."""

    def __init__(self, spec: ServerSpec, known_at_start: frozenset[str]) -> None:
        self._ending = ExitHandler()
        self._run_zygote = partial(run_zygote, ending=self._ending, known_at_start=known_at_start)
        self._mark = EnvironVariable(LAUNCH_MARK)
        self._folder = ServerFolder(spec.folder)
        self._idle_s = spec.idle_s
        self._shims: set[int] = set()
        self._sessions: dict[int, int] = {}
        """The leaders of login sessions, by pidfd."""
        self._reactor = Reactor()
        self._idle = self._reactor.call_at(None, self._end)
        self._has_lost_session = False
        """Whether a session that used this server has ended."""
        self._in_child: Callable[[], object] | None = None
        """In a forked child, the function that it is to run."""
        signal.alarm(_STARTS_WITHIN_S)  # in case an import hangs, here or in the lock's holder
        with self._folder.locked():
            if self._has_equal(spec.required):
                os._exit(0)
            described, files = self._import(spec), identity.loaded_files(sys.modules)
            for found in self._folder.servers()[MOST_SERVERS - 1 :]:  # the least recently used
                stop_server(self._folder, found.server.pid)
            try:
                self._listener = self._folder.listen()
                self._folder.describe(described, files)
            except OSError as error:  # the disk is full, or the folder is gone
                self._folder.forget(os.getpid())  # which makes room for the reason
                self._folder.leave_reason(
                    f"cannot write to `{self._folder.path}`: {error.strerror}"
                )
                os._exit(0)
        signal.alarm(0)
        self._watch(spec.session)

    def serve(self) -> Callable[[], object]:
        """Fork shims until it is time to end; return only in a fork."""
        for signum in (signal.SIGCHLD, signal.SIGIO):
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        self._folder.watch()
        self._reactor.on_signal(self._wake_up)
        self._reactor.add_reader(self._listener, self._accept)
        self._set_idle()
        while self._in_child is None:
            self._reactor.turn()
        return self._in_child

    def _has_equal(self, required: identity.Requirements) -> bool:
        """Return whether another run has left an equal server in the meantime."""
        return any(
            identity.find_mismatch(found.server, required) is None
            and self._folder.changed_library(found.server) is None
            for found in self._folder.servers()
        )

    def _import(self, spec: ServerSpec) -> identity.ServerDescription:
        """Import the modules that exist; exit if forks of this process cannot run the program."""
        watch, required = ImportWatch(), spec.required
        gc.disable()
        with _record_reads() as read, nvml_based_cuda_check():
            for module in BASE:
                _import_if_available(module, watch)
            base = identity.packages(sys.modules)
            for module in required.modules:
                _import_if_available(module, watch)
        gc.enable()
        self._ending.keep_modules()
        gc.freeze()  # the collector must not write to memory that forks share
        extra = identity.packages(required.modules) - base
        if reason := _why_unfit(required.changed, watch, read if extra else ()):
            if extra:
                with suppress(OSError), open(spec.unfit, "wb") as file:
                    file.write(reason.encode(errors="surrogateescape"))
            self._folder.leave_reason(reason)
            os._exit(0)
        return identity.ServerDescription(
            pid=os.getpid(),
            born=started_at(os.getpid()) or "",
            began=time.time(),
            idle_s=spec.idle_s,
            interpreter=identity.this_interpreter(),
            fixed=fixed_by_parent(),
            base=sorted(base),
            extra=sorted(extra),
            environment=identity.digests(required.environment, read),
            read=sorted(read),
            sources={
                path: identity.FileParts(stat=stat_of(path), words=identity.words_of(path, read))
                for path in required.own_files
            },
        )

    # ---- runs ------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if not is_as_privileged(connection):
            connection.close()
            return
        peer = peer_of(connection)
        with signals_blocked(_HANDLED):
            try:
                pid = os.fork()
            except OSError:  # the launcher sees the connection closed
                connection.close()
                return
            if pid == 0:
                self._leave()
                self._in_child = partial(serve_connection, connection, self._mark, self._run_zygote)
                return
        connection.close()
        self._shims.add(pid)
        self._folder.record_use(os.getpid())
        self._watch(leader_of_session(peer[0] if peer else 0))
        self._set_idle()

    def _leave(self) -> None:
        """In a fork, undo everything that belongs to the server."""
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        self._reactor.close()
        self._listener.close()
        self._folder.close()
        for fd in self._sessions:
            os.close(fd)

    def _wake_up(self) -> None:
        if not self._folder.describes(os.getpid()):  # as after a cleanup of /tmp: no run finds it
            self._end()
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self._shims.discard(pid)
        self._set_idle()

    # ---- the end ---------------------------------------------------------------------------

    def _watch(self, leader: int) -> None:
        """Watch a login session: the server ends once all that have used it have ended."""
        if not leader or leader in self._sessions.values():
            return
        try:
            pidfd = open_pidfd(leader)
        except OSError:  # it has ended meanwhile
            self._has_lost_session = True
            return
        self._sessions[pidfd] = leader
        self._reactor.add_reader(pidfd, partial(self._lose_session, pidfd))

    def _lose_session(self, pidfd: int) -> None:
        self._reactor.remove(pidfd)
        os.close(pidfd)
        del self._sessions[pidfd]
        self._has_lost_session = True
        self._set_idle()

    def _set_idle(self) -> None:
        if self._shims:
            self._idle.cancel()
        elif self._has_lost_session and not self._sessions:
            self._end()
        else:
            self._idle.restart(self._idle_s)

    def _end(self) -> NoReturn:
        self._folder.forget(os.getpid())
        os._exit(0)


def _import_if_available(module: str, watch: ImportWatch) -> None:
    with suppress(Exception):
        importlib.import_module(module)
    watch.imported(module)


def _why_unfit(changed: Collection[str], watch: ImportWatch, read: Collection[str]) -> str | None:
    if (reason := watch.why_unsafe()) is not None:
        return reason
    for name, path in module_files(sys.modules):
        if name != "__main__" and is_own(path):
            return f"a library imports `{path}`, which is not installed"
    if late := identity.set_too_late(changed, read):
        return f"the program sets {late[0]}, which a library reads while it is imported"
    return None


@contextmanager
def _record_reads() -> Iterator[set[str]]:
    """Yield the names of the variables that Python code reads while the block runs.

    Code that copies the environment, by reading all variables in their order, is not counted.
    """
    environ: Any = os.environ
    recorded = _RecordedReads(environ._data)
    environ._data = recorded
    try:
        yield recorded.names
    finally:
        environ._data = dict(recorded.items())


class _RecordedReads(dict[bytes, bytes]):
    """A replacement for the dictionary in ``os.environ`` that records the keys that are read."""

    def __init__(self, variables: dict[bytes, bytes]) -> None:
        super().__init__(variables)
        self.names: set[str] = set()
        self._copied: Iterator[bytes] = iter(())

    def __iter__(self) -> Iterator[bytes]:
        self._copied = iter(list(super().__iter__()))
        return super().__iter__()

    def __getitem__(self, key: bytes) -> bytes:
        if next(self._copied, None) != key:
            self._copied = iter(())
            self.names.add(os.fsdecode(key))
        return super().__getitem__(key)
