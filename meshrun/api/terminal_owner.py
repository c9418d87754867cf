"""Grants a rank, which runs in another session, this process's terminal."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from meshrun.host.process_state import is_foreground
from meshrun.host.processes import send_signal
from meshrun.worker.call_channel import Channel
from meshrun.worker.rank_terminal import AcquireTerminal, ReleaseTerminal


class TerminalOwner:
    """Grants the terminal to the first rank that requests it in a call, and to no other.

    ``around`` is a context in which to grant it, such as one that restores our own streams.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._around = around
        self._has_granted = False
        self.has_quit = False
        """Whether the user has quit the debugger."""

    def handle(self, message: object, pid: int, channel: Channel) -> bool:
        """Reply to a request, and wait for the terminal's release; ``False`` for other messages."""
        if not isinstance(message, AcquireTerminal):
            return False
        if self._has_granted:
            channel.send(None)
            return True
        self._has_granted = True
        with self._around(), grant_terminal(pid) as terminal:
            channel.send(terminal)
            if terminal is not None:
                done: ReleaseTerminal = channel.receive()
                self.has_quit = done.quits
        return True


@contextmanager
def grant_terminal(pid: int) -> Iterator[str | None]:
    """Yield the name of the terminal that is our stdin, or ``None`` if there is none to grant.

    While the block runs, Ctrl-C goes to process ``pid``, and Ctrl-Z is ignored: otherwise the shell
    and the process would take turns reading the terminal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and os.isatty(0) and is_foreground(0)):
        yield None
        return
    sys.stdout.flush()
    modes = termios.tcgetattr(0)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda signum, _: send_signal(pid, signum)),
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, signal.SIG_IGN),
    }
    try:
        yield os.ttyname(0)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
