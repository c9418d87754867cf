"""Name lookups that do not block."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable

from meshrun.host.interfaces import look_up
from meshrun.host.processes import die_with_parent
from meshrun.host.reactor import Reactor


class Lookup:
    """A lookup of a name in a forked child, as a resolver may take many seconds.

    Args:
        host: The name.
        reactor: The reactor that waits for the answer.
        answered: Called with the addresses and, if there are none, the reason.
    """

    def __init__(
        self, host: str, reactor: Reactor, answered: Callable[[list[str], str], object]
    ) -> None:
        self._reactor, self._answered = reactor, answered
        self._read, write = os.pipe()
        parent = os.getpid()
        # Block signals, so that none is delivered to the child while it has our handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                die_with_parent(parent)
                os.close(self._read)
                os.write(write, _look_up(host))
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write)
        reactor.add_reader(self._read, self._take)

    def _take(self) -> None:
        text = b"".join(iter(lambda: os.read(self._read, 65536), b""))
        self.close()
        self._answered(*(json.loads(text) if text else ([], "the lookup was stopped")))

    def close(self) -> None:
        """Stop the lookup if it is still running."""
        if self._pid:
            self._reactor.remove(self._read)
            os.close(self._read)
            with contextlib.suppress(OSError):
                os.kill(self._pid, 9)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _look_up(host: str) -> bytes:
    try:
        return json.dumps([look_up(host), ""]).encode()
    except (OSError, UnicodeError) as error:
        return json.dumps([[], getattr(error, "strerror", None) or str(error)]).encode()
