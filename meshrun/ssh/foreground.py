"""The foreground process, which may be suspended while its child, the controller, keeps running."""

from __future__ import annotations

import os
import signal
import sys

from meshrun.errors import HostError
from meshrun.host.process_state import wait_until_stopped
from meshrun.host.processes import die_with_parent, send_signal
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import signal_name
from meshrun.supervisor.signals import SignalQueue


def fork_controller(request: LaunchRequest) -> int | None:
    """Fork; return ``None`` in the child, and here how it ended: exit code, or -n for signal n.

    The child has its own session, so signals from the shell or the user reach this process, which
    forwards them. It dies with this process.

    Raises:
        HostError: If the child was killed, and so could not report why.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with_parent(own)
        return None
    signals = SignalQueue(
        (*request.stop_signals, signal.SIGTSTP),
        even_if_ignored=request.stop_even_if_ignored,
        always=(signal.SIGQUIT, signal.SIGCONT, signal.SIGCHLD, *request.forwarded_signals),
    )
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        for signum in signals.wait():
            if signum != signal.SIGCHLD:
                send_signal(child, signum)
    signals.restore_late()
    code = os.waitstatus_to_exitcode(ended[1])
    if -code in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        raise HostError(
            f"the process that talks to the hosts was killed by {signal_name(-code)};"
            " each host stops its ranks"
        )
    return code


def suspend_foreground() -> None:
    """Suspend the parent, which the shell waits for, as Ctrl-Z requests; for the child."""
    send_signal(pid := os.getppid(), signal.SIGSTOP)
    wait_until_stopped([pid])
