"""How this process ends after a launch."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from meshrun.errors import HostError
from meshrun.host.descriptors import say

if TYPE_CHECKING:
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


_told_end: list[Callable[[int], None]] = []


def tell_end_by(tell: Callable[[int], None]) -> None:
    """Have the exit code of this process told, whichever way it ends."""
    _told_end.append(tell)


def end_with(code: int) -> NoReturn:
    """Exit with a code."""
    _tell_end(code)
    sys.exit(code)


def _tell_end(code: int) -> None:
    while _told_end:
        _told_end.pop()(code)


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
    _tell_end(128 + signum)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
