"""A launch on hosts that the user, a scheduler or Ray names."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from meshrun.cli.options import CONTROLLER_OPTIONS, Options, forget_variables
from meshrun.errors import HostError, exit_code_of
from meshrun.host.detect_host import detect_host
from meshrun.host.processes import die_with_parent, send_signal, set_title
from meshrun.host.stderr import note
from meshrun.plan.plan import check_elsewhere
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import LaunchResult, Timings, describe_stop, signal_name
from meshrun.report.result_json import leave_report
from meshrun.ssh.connect import StoppedBySignal
from meshrun.ssh.controller import Controller
from meshrun.ssh.host_session import FirstLost, HostLost
from meshrun.supervisor.signals import SignalQueue

_LOSS_WINDOW_S = 600.0
_MAX_LOSSES = 3
"""How many times within that window a launch restarts because its first host was lost."""


def launch_on_hosts(options: Options, request: LaunchRequest) -> int:
    """Launch on the hosts that were named; return the exit code, or -n for signal n."""
    check_elsewhere(request, detect_host())
    try:
        returncode = _fork_controller(request)
    except HostError as error:  # it was killed
        if options.report is not None:
            leave_report(replace(_ended_now(error.exit_code), trouble=error), options.report)
        raise
    if returncode is not None:
        return returncode
    set_title("controller", *sys.argv[1:])
    words = options.line.words(without={row.flag for row in CONTROLLER_OPTIONS})
    forget_variables(CONTROLLER_OPTIONS)
    losses: list[float] = []
    excluded: dict[str, str] = {}
    while True:
        controller = Controller(request, words, excluded=excluded)
        try:
            return _run(controller, options.report)
        except FirstLost:
            now_s = time.monotonic()
            losses = [at_s for at_s in (*losses, now_s) if now_s - at_s < _LOSS_WINDOW_S]
            if len(losses) > _MAX_LOSSES:
                raise
            note("restarting with the remaining hosts")


def _fork_controller(request: LaunchRequest) -> int | None:
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


def _run(controller: Controller, report: str | None) -> int:
    """Launch once and write the report; return the exit code, or -n for signal n.

    Raises:
        HostError: If the launch succeeded, but its result is not known.
    """
    result = None
    try:
        code = controller.run()
        if report is not None and not code and controller.result is None:
            raise HostError(f"cannot write `{report}`: the first host could not send the result")
        return code
    except StoppedBySignal as error:
        note(describe_stop(error.signum))
        code = exit_code_of(error.signum)
        result = replace(controller.result or _ended_now(code), exit_code=code, signum=error.signum)
        return -error.signum
    except HostLost as error:
        found = controller.result or _ended_now(error.exit_code)
        result = replace(found, exit_code=error.exit_code, signum=None, trouble=error)
        raise
    finally:
        if report is not None and (known := result or controller.result):
            leave_report(known, report)


def _ended_now(exit_code: int) -> LaunchResult:
    """Return the result of a launch of which no launcher has reported one."""
    now_ns = time.monotonic_ns()
    timings = Timings(began_ns=now_ns, ended_ns=now_ns)
    return LaunchResult(exit_code=exit_code, timings=timings)
