"""A launch on hosts that the user, a scheduler or Ray names."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from meshrun import __version__
from meshrun.cli.end import end_as, leave_report
from meshrun.cli.options import Options
from meshrun.cli.words import CommandLine
from meshrun.host.descriptors import say
from meshrun.host.detect_host import detect_host
from meshrun.host.title import set_title
from meshrun.plan.plan import check_elsewhere
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import LaunchResult, Timings, describe_stop
from meshrun.report.result_json import parse_result_json
from meshrun.ssh.connect import Stopped
from meshrun.ssh.controller import Controller
from meshrun.ssh.foreground import fork_controller
from meshrun.ssh.host_failure import FirstLost, HostLost

OF_THE_CONTROLLER = {
    row.flag
    for row in (
        *(Options.hosts, Options.hostfile, Options.include, Options.exclude, Options.export),
        *(Options.ssh, Options.connect_timeout, Options.launcher, Options.report, Options.nnodes),
        *(Options.submit, Options.submit_arg),
    )
}
"""Options that the launchers of nodes are not given: they chose the hosts, or hold for all."""
_SOON_S = 600.0
_MOST_LOSSES = 3
"""How often a launch on hosts may restart within that time, as its first host was lost."""


def launch_on_hosts(
    request: LaunchRequest,
    line: CommandLine,
    *,
    report: str | None,
) -> int:
    """Launch on the hosts that were named and return the exit code, or end by the signal."""
    check_elsewhere(request, detect_host())
    if (controlled := fork_controller(request)) is not None:
        return end_as(controlled)
    set_title("controller", *sys.argv[1:])
    words = line.words(without=OF_THE_CONTROLLER)
    losses: list[float] = []
    excluded: dict[str, str] = {}
    ended: int | None = None
    while ended is None:
        controller = Controller(request, words, version=__version__, excluded=excluded)
        lost, stopped = None, 0
        try:
            ended = controller.run()
        except Stopped as error:
            stopped = error.signum
            say(f"meshrun: {describe_stop(stopped)}")
            ended = -stopped
        except HostLost as error:
            lost = error
            if not isinstance(error, FirstLost):
                raise
            losses = [at for at in (*losses, time.monotonic()) if time.monotonic() - at < _SOON_S]
            if len(losses) > _MOST_LOSSES:
                raise
            say("meshrun: restarting with the remaining hosts")
        finally:
            told = controller.report and parse_result_json(controller.report)
            if lost is not None:
                told = replace(
                    told or _nothing_known(), exit_code=lost.exit_code, signum=None, trouble=lost
                )
            elif stopped:
                told = told or replace(_nothing_known(), exit_code=128 + stopped, signum=stopped)
            if report is not None and told:
                leave_report(told, report)
    return end_as(ended)


def _nothing_known() -> LaunchResult:
    """Return the result of a launch of which node 0 has no report."""
    now_ns = time.monotonic_ns()
    return LaunchResult(
        exit_code=1,
        signum=None,
        failures=(),
        broken_program=None,
        trouble=None,
        timings=Timings(began_ns=now_ns, ended_ns=now_ns),
    )
