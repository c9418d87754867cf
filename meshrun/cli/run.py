"""What options ask for: print a plan, submit a job, launch here, or launch on hosts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from meshrun.cli.check import check_mesh, check_program, check_requirements
from meshrun.cli.end import end_as, end_by_signal, leave_report
from meshrun.cli.options import Options
from meshrun.cli.read import (
    build_rendezvous_request,
    build_request,
    check_accepted,
    check_hosts,
    on_hosts,
    read_program,
)
from meshrun.cli.words import LAUNCHERS, CommandLine, misplaced
from meshrun.errors import MeshrunError, NodeLostError, UsageError
from meshrun.host.descriptors import allow_descriptors, say, say_as
from meshrun.host.title import set_title
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import LaunchResult
from meshrun.protocol.step_end import report_end
from meshrun.supervisor.program_file import read_source

if TYPE_CHECKING:
    from meshrun.cli.began import Began
    from meshrun.cluster import ClusterFacts


_FEWEST_FILES = 64
"""What a launch has open on its way to being one."""
_OF_A_DRY_RUN = (Options.format, Options.output, Options.rank, Options.color_dim, Options.all)
_OF_ONE_NODE = {
    row.flag
    for row in (
        *(Options.node_rank, Options.rdzv_endpoint),
        *(Options.master_addr, Options.master_port, Options.local_addr),
    )
}
"""Options that differ between nodes."""


def run(options: Options, line: CommandLine, began: Began) -> int:
    """Do what the options say, and return the exit code."""
    if options.where:
        from meshrun.cli.where import show_where

        return show_where(options, line)
    is_launch = not options.dry_run and options.submit is None
    with _telling_others(options) if is_launch else nullcontext():
        check_accepted(options)
        read = check_program if options.check else read_program
        program = read(options, line.program)
        request = on_hosts(build_request(options, program), options)
        check_requirements(options, request)
        if is_launch:
            _check_dry_run(options)
            _check_host(request, options.report)
    if request.console.is_json:
        from meshrun.console.json_lines import as_json_message

        say_as(as_json_message)
    if began.hosts_present or began.caller is None:  # launch() knows which are the program's
        request = replace(request, notes=(*request.notes, *_misplaced(options, program, line)))
    if options.submit == "ray":
        from meshrun.cli.on_ray import launch_on_ray

        return launch_on_ray(options, request, line, began)
    if options.submit is not None:
        check_hosts(request, options)
        from meshrun.cli.submit import submit

        if began.caller is not None:
            raise UsageError(
                "--submit cannot be used with launch(), which returns the result of the ranks",
                hint=f"subprocess.run(['meshrun', '--submit', '{options.submit}', ...])",
            )
        return submit(options, request, line)
    if options.dry_run:
        show_plan(request, options)
        return 0
    return _start(request, options, line, began)


def _start(request: LaunchRequest, options: Options, line: CommandLine, began: Began) -> int:
    """Launch once, or as often as files change, or with a prompt, or to measure."""
    if options.check:
        return check_mesh(options, request, lambda asked: _launch(asked, options, line, began))
    if options.interactive:
        from meshrun.cli.interactive import interact

        return interact(options, request, line, began)
    if options.watch:
        from meshrun.cli.watch import watch_files

        return end_as(watch_files(request, line, began))
    return _launch(request, options, line, began)


def _launch(request: LaunchRequest, options: Options, line: CommandLine, began: Began) -> int:
    """Launch here, or on the hosts that the user or a scheduler names."""
    if options.per_task:
        from meshrun.cli.per_task import become_rank

        become_rank(options, request)
    cluster = None
    if not began.hosts_present:
        from meshrun import app

        request, cluster = app.ask_cluster(request, is_child=began.caller is not None)
        check_hosts(request, options)
    if request.remote is not None:
        _check_host(request, None)
        for note in request.rendezvous.notes:
            say(f"meshrun: {note}")
        from meshrun.cli.on_hosts import launch_on_hosts

        return launch_on_hosts(request, line, report=options.report)
    return launch_here(
        request, line, cluster, show_timings=options.timings, report=options.report, began=began
    )


def _check_host(request: LaunchRequest, report: str | None) -> None:
    """Check that this process has a folder, and may open what it has to."""
    from meshrun.supervisor.program_file import check_folder

    check_folder()
    allow_descriptors(_FEWEST_FILES + 4 * len(request.hosts))
    if report is not None:
        from meshrun.host.whole_file import check_target

        check_target(report, Options.report.flag)


def _check_dry_run(options: Options) -> None:
    """Refuse what is typed for a dry run alone, where there is none."""
    for row in _OF_A_DRY_RUN:
        if options.check and row in (Options.format, Options.output):
            continue
        if options.is_typed(row):
            hint = (
                "add --dry-run, or use --node-rank to number this node"
                if row is Options.rank
                else None
            )
            raise UsageError(f"{row.flag} requires --dry-run", hint=hint)


def _misplaced(options: Options, program: Program, line: CommandLine) -> Iterator[str]:
    """What is meshrun's before the program, and after it is the program's, for people."""
    typed = {row.flag for row in options.rows() if options.is_typed(row)}
    names = [name for name in misplaced(line.program[1:], line.takes_value) if name not in typed]
    if not names:
        return
    source = read_source(program)
    for name in names:
        words = {name[2:], name[2:].replace("-", "_")}
        is_known = name not in LAUNCHERS if source is None else any(map(source.__contains__, words))
        if not is_known:
            yield f"passing {name} to the program; put options of meshrun before the program"


@contextmanager
def _telling_others(options: Options) -> Iterator[None]:
    try:
        yield
    except MeshrunError as error:
        give_up(options, error)
        raise


def show_plan(request: LaunchRequest, options: Options) -> None:
    """Print what would be started."""
    from meshrun import app
    from meshrun.report.check_node import check_gpus
    from meshrun.report.plan_output import print_plan

    for line in request.notes:
        say(f"meshrun: {line}")
    request, cluster = app.ask_cluster(request)
    check_hosts(request, options)
    plan = app.plan(request, check_host=False, cluster=cluster)
    if options.is_typed(Options.color_dim) and options.format != "svg":
        raise UsageError("--color-dim requires --format svg")
    print_plan(
        plan,
        options.format,
        every_row=options.all,
        output=options.output,
        color_dim=options.color_dim,
        rank=options.rank,
    )
    check_gpus(plan)


def launch_here(
    request: LaunchRequest,
    line: CommandLine,
    cluster: ClusterFacts | None,
    *,
    show_timings: bool,
    report: str | None,
    began: Began,
) -> int:
    """Launch the ranks of this node and return the exit code, or end by the signal that came."""
    from meshrun import app
    from meshrun.console.console import Console
    from meshrun.report.failure import render_failure
    from meshrun.report.progress import StartProgress

    if began.hosts_present:
        rendezvous = replace(request.rendezvous, present=began.hosts_present)
        # What a host's agent starts ends with the launch.
        request = replace(request, rendezvous=rendezvous, warm_idle_s=None)
    if request.rendezvous.step_of is not None:
        from meshrun.submit.srun_step import launch_on_nodes

        return launch_on_nodes(request, line.words(), job=request.rendezvous.step_of)
    plan = app.plan_or_decline(request, cluster)
    set_title("launcher", *sys.argv[1:])
    quiet, console = began.is_quiet, Console(is_json=plan.request.console.is_json)
    progress = StartProgress(plan, console, quiet=quiet)
    command = command_for_others(line)
    result = app.launch(
        plan,
        console,
        watchers=[progress],
        began_ns=began.at_ns,
        paste=None if began.hosts_present or _are_started(cluster, request) else command,
        caller=began.caller,
    )
    if show_timings and not quiet:
        from meshrun.report.timings import render_timings

        say(render_timings(result.timings))
    # On a file system that nodes share there is one file, and the first node knows the most.
    if report is not None and (
        progress.is_first_node or (result.exit_code and not result.elsewhere)
    ):
        leave_report(result, report)
    if not _is_told_elsewhere(result, began):
        unseen, bare = progress.without_what_was_seen(result), request.console.prefix != "mesh"
        if text := render_failure(unseen, told_lost=progress.told_lost, bare=bare):
            say(text)
    if began.step and not began.is_first_task:
        code, is_over = _exit_code(request, result), bool(result.elsewhere)
        report_end(began.step, code, is_first=False, is_over=is_over)
    if plan.is_elastic and _is_other_task(cluster):
        return 0  # srun returns the worst code of all nodes, and the launch has that of the first
    return _end_with(request, result)


def _is_told_elsewhere(result: LaunchResult, began: Began) -> bool:
    """Whether our caller, the first node or the controller of all hosts says how it ended."""
    is_stopped, caller = result.signum is not None, began.caller
    if is_stopped and caller is not None and caller.why_ended:
        return True
    is_first_lost = isinstance(result.trouble, NodeLostError)
    return began.is_quiet and (is_stopped or is_first_lost or bool(result.elsewhere))


def _end_with(request: LaunchRequest, result: LaunchResult) -> int:
    """Return the exit code of a launch, or end by the signal that ended it."""
    is_by_signal = result.signum is not None and not result.preempted
    if result.signum is not None and is_by_signal and request.exit_codes != "torchrun":
        end_by_signal(result.signum)
    return _exit_code(request, result)


def _exit_code(request: LaunchRequest, result: LaunchResult) -> int:
    return int(result.exit_code != 0) if request.exit_codes == "torchrun" else result.exit_code


def _are_started(cluster: ClusterFacts | None, request: LaunchRequest) -> bool:
    """Whether a scheduler starts the launchers of all nodes, and nobody is to type them."""
    if cluster is None or cluster.node_rank is None or cluster.shell is not None:
        return False
    return cluster.nnodes is None or cluster.nnodes >= (request.nnodes or 1)


def _is_other_task(cluster: ClusterFacts | None) -> bool:
    """Whether a scheduler started this process, and another one on the first node."""
    return cluster is not None and cluster.task is not None and bool(cluster.node_rank)


def give_up(options: Options, error: MeshrunError) -> None:
    """Tell other nodes that this one was started with what cannot be read, if it is known where."""
    try:
        request = build_rendezvous_request(options)
    except MeshrunError:
        return
    if (request.nnodes or 1) > 1:
        from meshrun.supervisor.decline import decline

        decline(request, error)


def command_for_others(line: CommandLine) -> str:
    """Return the command line for the other nodes, where ``ENDPOINT`` is yet to be filled in."""
    return f"meshrun --rdzv-endpoint ENDPOINT {shlex.join(line.words(without=_OF_ONE_NODE))}"
