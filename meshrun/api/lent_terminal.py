"""Lends this process's terminal to a rank, which is a process of another session."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshrun.host.processes import is_foreground, send_signal


@contextmanager
def lend_terminal(pid: int) -> Iterator[str | None]:
    """Give the name of the terminal that is our stdin, ``None`` if there is none to lend.

    While the block runs, Ctrl-C is the process's, and Ctrl-Z does nothing: the shell and the
    process would read the terminal in turn.
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
        termios.tcsetattr(0, termios.TCSADRAIN, modes)
