"""How this process ends: with a code, or by a signal."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from meshrun.errors import UsageError, exit_code_of
from meshrun.host.stderr import note
from meshrun.plan.choices import STOP_SIGNALS

if TYPE_CHECKING:
    from meshrun.plan.choices import ExitCodes

_at_end: list[Callable[[int], None]] = []


def call_at_end(function: Callable[[int], None]) -> None:
    """Call a function with the exit code of this process when it ends, even by a signal."""
    _at_end.append(function)


def returncode(exit_codes: ExitCodes, code: int, *, of_rank: bool = False) -> int:
    """Return an exit code, or -n for signal n, as ``--exit-code`` says.

    torchrun's is 1 for any failure, except for a wrong command line, if ``code`` is no rank's. Only
    the launch knows whether it is, and ``run_line`` maps what else comes back; a mapped code stays.
    """
    if exit_codes == "worker" or (code == UsageError.exit_code and not of_rank):
        return code
    return int(code != 0)


def end_with(code: int) -> NoReturn:
    """Exit with a code."""
    _announce_end(code)
    sys.exit(code)


def _announce_end(code: int) -> None:
    while _at_end:
        _at_end.pop()(code)


def end_by_signal(signum: int) -> int:
    """End by a signal, so that the shell sees what ended this process.

    Returns:
        The exit code to use instead in PID 1 of a container, which its own signals do not end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    return _end(signum)


def _end(signum: int) -> int:
    atexit._run_exitfuncs()  # a signal skips them
    code = exit_code_of(signum)
    _announce_end(code)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    return code


def end_by_signals(*, silently: bool) -> None:
    """Have the signals that stop a launch end this process in the same way until it begins.

    Without a handler, PID 1 of a container would not receive them.
    """
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, end_silently if silently else _say_and_end)


def end_silently(signum: int, _frame: object) -> NoReturn:
    """Handle a signal: end by it, even in the middle of writing output that nobody reads."""
    signal.signal(signum, signal.SIG_IGN)  # let the exit handlers finish
    os._exit(_end(signum))


def _say_and_end(signum: int, frame: object) -> NoReturn:
    with suppress(OSError, RuntimeError):  # stderr is closed, or it was being written to
        if select.select([], [2], [], 0)[1]:
            note(f"stopped by {signal.Signals(signum).name}")
    end_silently(signum, frame)
