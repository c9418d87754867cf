"""How this process ends after a launch."""

from __future__ import annotations

import atexit
import os
import signal
import sys

from meshrun.errors import HostError
from meshrun.host.descriptors import say
from meshrun.protocol.result import LaunchResult


def leave_report(result: LaunchResult, path: str) -> None:
    """Write the report of a launch; that this cannot be done never hides how the launch failed.

    Raises:
        HostError: If it cannot be written, and the launch succeeded.
        OSError: If stdout cannot be written, likewise.
    """
    from meshrun.report.result_json import write_report

    try:
        write_report(result, path)
    except (HostError, OSError) as error:
        if result.exit_code == 0:
            raise
        why = f"cannot write the report: {error.strerror}" if isinstance(error, OSError) else error
        say(f"meshrun: {why}")


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
