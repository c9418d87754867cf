"""A call in a forked child, for what may take long, never return, or crash."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import ClassVar, Generic, NoReturn, TypeVar

from meshrun.errors import InternalError
from meshrun.host.processes import die_with_parent, signals_blocked
from meshrun.host.reactor import Reactor

T = TypeVar("T")
_EXIT_TAKES_S = 0.5
"""A process that waits for a driver may not even end by SIGKILL."""


class ForkedCall(Generic[T]):
    """A running call, whose result is pickled.

    Its process has none of our descriptors, so that a pipe or a connection closes with us even if
    the call never ends.
    """

    running: ClassVar[set[int]] = set()
    """The processes of all calls that have not been taken or closed."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._began_s = time.monotonic()
        self.killed_by: int | None = None
        """The signal that ended the call, if one did."""
        self._read, write = os.pipe()
        parent = os.getpid()
        try:
            with signals_blocked(signal.valid_signals()):
                self.pid = os.fork()
                if self.pid == 0:
                    _answer(call, write, parent)
        except OSError:
            os.close(self._read)
            raise
        finally:
            os.close(write)
        self.running.add(self.pid)

    @property
    def age_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began_s

    def fileno(self) -> int:
        """Return the descriptor that is ready once the call has ended; -1 if it was taken."""
        return self._read

    def wait(self, most_s: float) -> bool:
        """Wait until the call has ended, but at most for ``most_s``; return whether it has."""
        ready = select.poll()
        ready.register(self._read, select.POLLIN)
        return bool(ready.poll(math.ceil(max(0.0, most_s) * 1000)))

    def take(self) -> T | None:
        """Return what the call returned; ``None`` if its process was killed."""
        text = b"".join(iter(lambda: os.read(self._read, 65536), b""))
        self._finish()
        if not text:
            return None
        value, error = pickle.loads(text)  # noqa: S301 - from a fork of this process
        if error:
            raise InternalError(error)
        return value  # type: ignore[no-any-return]

    def follow(self, reactor: Reactor, done: Callable[[T | None], object]) -> None:
        """Pass on what :meth:`take` returns in a turn of the loop, unless removed from it."""

        def take() -> None:
            reactor.remove(self)
            done(self.take())

        reactor.add_reader(self, take)

    def close(self) -> None:
        """Stop the call, unless it has been taken."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            self._finish()

    def _finish(self) -> None:
        os.close(self._read)
        self._read = -1
        deadline, pid, status = time.monotonic() + _EXIT_TAKES_S, 0, 0
        with contextlib.suppress(ChildProcessError):
            while not pid and time.monotonic() < deadline:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                time.sleep(0 if pid else 0.001)  # it has answered, and is about to exit
        self.running.discard(self.pid)
        self.pid = 0
        if pid and os.WIFSIGNALED(status):
            self.killed_by = os.WTERMSIG(status)


def _answer(call: Callable[[], object], write: int, parent: int) -> NoReturn:
    """Send what a call returns, in the child."""
    try:
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        for inherited in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, write}:
            with contextlib.suppress(OSError):
                os.close(inherited)
        try:
            answer = pickle.dumps((call(), ""))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
        with open(write, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)
