"""Signals to the launcher, queued for its loop, and ranks that are stopped while it runs."""

from __future__ import annotations

import atexit
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any

from meshrun.host.reactor import Reactor

_NOT_FATAL = (signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD)
"""Signals that do not end a process by default."""
_SENT_TWICE_S = 0.02
"""How far apart signals of one request may arrive: timeout(1) signals us, and then our group."""
_CHECK_EVERY_S = 0.5
"""The kernel reports that a child is stopped, but not that the caller is."""


class SignalQueue:
    """Catches signals until :meth:`restore`; a pipe becomes readable with each."""

    def __init__(
        self,
        signums: Iterable[int],
        *,
        even_if_ignored: bool = False,
        always: Iterable[int] = (),
        even_if_blocked: bool = True,
    ) -> None:
        """Begin to catch.

        Args:
            signums: Signals to catch; if sent twice at once, all but SIGINT count as one.
            even_if_ignored: Whether to catch signals that are ignored now, such as SIGHUP by nohup.
            always: Signals to catch each time, even if ignored, such as SIGQUIT in the background.
            even_if_blocked: Whether to unblock them, such as SIGINT in Ray's workers.
        """
        self._caught: deque[int] = deque()
        signums = tuple(signums)
        self._last_s = dict.fromkeys({*signums} - {signal.SIGINT}, 0.0)
        """When each signal that may be sent twice arrived last."""
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._before: dict[int, Any] = {}
        for signum in dict.fromkeys((*signums, *always)):
            before = signal.getsignal(signum)
            if even_if_ignored or signum in always or before != signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._catch)
        if even_if_blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        self._wakeup_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._wake_read

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call."""
        try:
            arrived = os.read(self._wake_read, 4096)
            os.write(self._wakeup_fd, arrived)  # for the event loop of a program that calls us
        except OSError:  # nothing has arrived, or no such loop
            pass
        return [self._caught.popleft() for _ in range(len(self._caught))]

    def wait(self) -> list[int]:
        """Wait for a signal, and return all that have arrived."""
        select.select([self], [], [])
        return self.take()

    def suspend_here(self) -> None:
        """Stop this process by SIGTSTP, and return once it is continued."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def restore(self) -> list[int]:
        """Restore the previous effect of each signal; return those not taken."""
        return self._restore({})

    def restore_late(self) -> None:
        """As :meth:`restore`, but the first signal that ends this process does so with a delay.

        A launch that is about to end keeps its exit code, and one that hangs is ended.
        """
        from meshrun.console.outlet import LAST_WORDS_TAKE_S  # slow to import

        late = [
            signum
            for signum, before in self._before.items()
            if before != signal.SIG_IGN and signum not in _NOT_FATAL
        ]

        def end_later(signum: int, _: object) -> None:
            signal.signal(signum, self._before[signum])
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signum))
            signal.setitimer(signal.ITIMER_REAL, LAST_WORDS_TAKE_S)

        def ignore() -> None:  # Python removes its handlers long before it has ended
            for signum in (*late, signal.SIGALRM):
                signal.signal(signum, signal.SIG_IGN)

        self._restore(dict.fromkeys(late, end_later))
        atexit.register(ignore)

    def _catch(self, signum: int, _: object) -> None:
        if signum in self._last_s:
            now_s, last_s = time.monotonic(), self._last_s[signum]
            if now_s < last_s + _SENT_TWICE_S:
                return
            self._last_s[signum] = now_s
        self._caught.append(signum)

    def _restore(self, others: Mapping[int, Any]) -> list[int]:
        signal.set_wakeup_fd(self._wakeup_fd)
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._catch:  # no handler has replaced it since
                signal.signal(signum, others.get(signum, before))
        left = self.take()
        os.close(self._wake_read)
        os.close(self._wake_write)
        return left


class _Ranks(Enum):
    RUN = auto()
    STOPPED_WITH_CALLER = auto()
    STOPPED_UNTIL_SIGCONT = auto()


class Pause:
    """Whether the ranks are stopped, with a periodic check of whether they should be.

    Args:
        is_caller_stopped: Returns whether the program that started this launcher is stopped;
            ``None`` if the launcher is a job of the shell, which is stopped itself.
        stop: Called repeatedly while ranks, including new ones, should be stopped.
        resume: Called when they should continue.
    """

    def __init__(
        self,
        reactor: Reactor,
        is_caller_stopped: Callable[[], bool] | None,
        *,
        stop: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._stop, self._resume = stop, resume
        self._ranks = _Ranks.RUN
        self.has_caller = is_caller_stopped is not None
        """Whether SIGTSTP stops only the ranks, not the launcher."""
        if is_caller_stopped is not None:
            reactor.every(_CHECK_EVERY_S, partial(self._check, is_caller_stopped))

    @property
    def is_on(self) -> bool:
        """Whether ranks are stopped."""
        return self._ranks is not _Ranks.RUN

    def begin(self, *, until_sigcont: bool) -> None:
        """Note that ranks are stopped: until SIGCONT if so, else until the caller continues."""
        if until_sigcont:
            self._ranks = _Ranks.STOPPED_UNTIL_SIGCONT
        elif not self.is_on:
            self._ranks = _Ranks.STOPPED_WITH_CALLER

    def end(self) -> None:
        """Note that ranks continue."""
        self._ranks = _Ranks.RUN

    def _check(self, is_caller_stopped: Callable[[], bool]) -> None:
        if self._ranks is _Ranks.STOPPED_UNTIL_SIGCONT or is_caller_stopped():
            self._stop()
        elif self.is_on:
            self._resume()
