"""``--where``: which scheduler is detected, and what a launch here would start."""

from __future__ import annotations

import os

from meshrun import app
from meshrun.cli.options import Options
from meshrun.cli.read import build_request, read_program, with_hosts
from meshrun.cluster import ClusterFacts
from meshrun.errors import MeshrunError, UsageError
from meshrun.plan.rank_program import Program
from meshrun.plan.scheduler_defaults import apply_cluster
from meshrun.plan.surroundings import read_cluster_facts
from meshrun.rendezvous.secret import read_secret
from meshrun.report.detected import Detected, render_detected, render_detected_json
from meshrun.report.plan_output import print_text


def show_where(options: Options) -> int:
    """Print what is detected and what would be started, and return the exit code of a launch."""
    if options.format == "svg":
        raise UsageError("--where cannot draw a picture", hint="use --format text or json")
    found = detect(options)
    render = render_detected_json if options.format == "json" else render_detected
    print_text(f"{render(found)}\n", options.output)
    return found.error.exit_code if found.error is not None else 0


def detect(options: Options) -> Detected:
    """Detect the scheduler and plan a launch, without starting anything.

    Raises:
        UsageError: If the command line does not describe a launch.
    """
    has_program = bool(options.line.program)
    program = read_program(options) if has_program else Program(kind="script", target="")
    request = with_hosts(build_request(options, program), options)
    facts: ClusterFacts | None = None
    try:
        facts = read_cluster_facts(request)
        request = apply_cluster(request, facts)
        planned = app.plan(request, check_host=False, cluster=facts)
    except MeshrunError as error:
        return Detected(facts=facts, request=request, error=error)
    config = planned.rendezvous
    has_secret = config is not None and bool(read_secret(os.environ, config))
    return Detected(facts=facts, request=request, plan=planned, has_secret=has_secret)
