"""``python -m meshrun`` and the ``meshrun`` command."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import time

_BEGAN_NS = time.monotonic_ns()
_FEW_COLLECTIONS = 50_000
"""New objects between two garbage collections; imports leave no garbage to find."""


def main(_known_at_start: object = None) -> None:
    """Run the command line and exit with its code."""
    from meshrun.cli.end import end_by_signals
    from meshrun.host.own_variables import HOSTS_PRESENT, PARENT_PID

    end_by_signals(silently=PARENT_PID in os.environ)  # its caller reports it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see interrupts_delayed()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # As some daemons start programs; the exit codes of children would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from meshrun.host.descriptors import open_standard_streams

    open_standard_streams()  # before anything else opens a file
    gc.set_threshold(_FEW_COLLECTIONS)
    atexit.register(gc.freeze)  # at exit, the interpreter collects garbage once more
    from meshrun.cli.command import run_command_line
    from meshrun.protocol.caller import Invocation, join_step

    hosts, _, quiet = os.environ.pop(HOSTS_PRESENT, "").partition(" ")
    task = join_step()
    caller = None
    if PARENT_PID in os.environ:
        from meshrun.api.launch import serve_caller

        caller = serve_caller()
    if caller is None:
        run_command_line(Invocation(_BEGAN_NS, task=task))
    known, report_error = caller
    present = tuple(hosts.split(",")) if hosts else ()
    invocation = Invocation(_BEGAN_NS, hosts_present=present, is_quiet=bool(quiet), caller=known)
    run_command_line(invocation, report_error=report_error)


if __name__ == "__main__":
    main()
