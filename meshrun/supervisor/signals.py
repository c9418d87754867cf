"""Signals to the launcher, queued for its loop."""

from __future__ import annotations

import atexit
import os
import select
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

_END_NOTHING = (signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD)


class SignalQueue:
    """Catches signals from its making to :meth:`restore`; a pipe becomes readable with each."""

    def __init__(
        self,
        signums: Iterable[int],
        *,
        even_if_ignored: bool = False,
        always: Iterable[int] = (),
    ) -> None:
        """Begin to catch.

        Args:
            signums: What to catch.
            even_if_ignored: Whether to catch what is ignored now, as nohup does to SIGHUP.
            always: What to catch although it may be ignored, as shells do in the background.
        """
        self._caught: deque[int] = deque()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._before: dict[int, Any] = {}
        for signum in dict.fromkeys((*signums, *always)):
            before = signal.getsignal(signum)
            if even_if_ignored or signum in always or before != signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, lambda number, _: self._caught.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)  # as Ray's workers block SIGINT
        self._wakeup_fd = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._woken

    def take(self) -> list[int]:
        """Return the signals that have come since the last time."""
        try:
            os.read(self._woken, 4096)
        except BlockingIOError:
            pass
        return [self._caught.popleft() for _ in range(len(self._caught))]

    def wait(self) -> list[int]:
        """Return the signals that have come, once there is one."""
        select.select([self], [], [])
        return self.take()

    def suspend_here(self) -> None:
        """Be stopped by SIGTSTP, as without us, and return once continued."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def restore(self) -> None:
        """Give each signal back what it did before."""
        self._restore({})

    def restore_late(self, most_s: float) -> None:
        """As :meth:`restore`, but what would end this process does so after ``most_s`` at first.

        So a launch that is about to end keeps its exit code, and one that hangs is ended.
        """
        late = [
            signum
            for signum, before in self._before.items()
            if before != signal.SIG_IGN and signum not in _END_NOTHING
        ]
        self._restore(dict.fromkeys(late, lambda number, _: self._put_off(number, most_s)))
        atexit.register(_ignore, *late, signal.SIGALRM)

    def _put_off(self, signum: int, most_s: float) -> None:
        signal.signal(signum, self._before[signum])
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signum))
        signal.setitimer(signal.ITIMER_REAL, most_s)

    def _restore(self, others: Mapping[int, Any]) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for signum, before in self._before.items():
            signal.signal(signum, others.get(signum, before))
        os.close(self._woken)
        os.close(self._wake)


def _ignore(*signums: int) -> None:
    """Have signals do nothing, as Python takes its handlers away long before it has ended."""
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)
