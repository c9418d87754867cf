"""How this process ends after a launch."""

from __future__ import annotations

import atexit
import os
import signal
import sys


def end_as(ended: int) -> int:
    """End by signal n for -n, or return an exit code."""
    if ended >= 0:
        return ended
    signum = -ended
    end_by_signal(signum)
    return 128 + signum  # the first process of a container ends by no signal of its own


def end_by_signal(signum: int) -> None:
    """End as the signal would have, so that the shell sees the truth."""
    atexit._run_exitfuncs()  # which a signal skips
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
