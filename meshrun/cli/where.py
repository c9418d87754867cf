"""``--where``: what is detected around this process, and what a launch here would mean."""

from __future__ import annotations

import os

from meshrun import __version__, app
from meshrun.cli.options import Options
from meshrun.cli.read import build_request, on_hosts, read_program
from meshrun.cli.words import CommandLine
from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import is_rank
from meshrun.errors import MeshrunError, UsageError
from meshrun.plan.find_cluster import find_cluster
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import fit_to_cluster
from meshrun.rendezvous.secret import read_secret
from meshrun.report.detected import Detected, render_detected, render_detected_json
from meshrun.report.plan_output import print_text


def show_where(options: Options, line: CommandLine) -> int:
    """Print what is detected and what would be started, and return the exit code of a launch."""
    if options.format == "svg":
        raise UsageError("--where cannot draw a picture", hint="use --format text or json")
    program = (
        read_program(options, line.program) if line.program else Program(kind="script", target="")
    )
    request = on_hosts(build_request(options, program), options)
    found = find_out(request)
    render = render_detected_json if options.format == "json" else render_detected
    print_text(f"{render(found)}\n", options.output)
    return found.error.exit_code if found.error is not None else 0


def find_out(request: LaunchRequest) -> Detected:
    """Find out what a launch here would mean; starts nothing."""
    facts: ClusterFacts | None = None
    try:
        facts, may_step = find_cluster(request)
        request = fit_to_cluster(request, facts, may_step=may_step)
        planned = app.plan(request, check_host=False, cluster=facts)
    except MeshrunError as error:
        return Detected(
            facts=facts, request=request, version=__version__, error=error, is_rank=is_rank()
        )
    meeting = planned.rendezvous
    return Detected(
        facts=facts,
        request=request,
        version=__version__,
        plan=planned,
        has_secret=meeting is not None and bool(read_secret(os.environ, meeting)),
        is_rank=is_rank(),
    )
