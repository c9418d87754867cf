"""Do what the options request: print a plan, submit a job, launch here, or launch on hosts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from meshrun.cli import read
from meshrun.cli.check_mesh import check_mesh, check_requirements, read_check_program
from meshrun.cli.end import returncode
from meshrun.cli.option import Option
from meshrun.cli.options import Options
from meshrun.cli.words import LAUNCHER_OPTIONS, CommandLine, misplaced
from meshrun.errors import MeshrunError, NodeLostError, UsageError
from meshrun.host.descriptors import allow_descriptors
from meshrun.host.processes import set_title
from meshrun.host.stderr import note, say, set_message_format
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.caller import Invocation
from meshrun.protocol.error_record import forward_error
from meshrun.protocol.result import LaunchResult
from meshrun.report.result_json import leave_report
from meshrun.report.result_text import render_failure, render_timings
from meshrun.supervisor.program_file import read_source

if TYPE_CHECKING:
    from meshrun.cluster import ClusterFacts
    from meshrun.plan.plan import LaunchPlan
    from meshrun.report.progress import StartProgress

_MIN_DESCRIPTORS = 64
"""Descriptors that a launcher needs besides those for its hosts."""
_DRY_RUN_OPTIONS = (Options.format, Options.output, Options.rank, Options.color_dim, Options.all)
_NODE_OPTIONS = (
    Options.node_rank.flag, Options.rdzv_endpoint.flag, Options.master_addr.flag,
    Options.master_port.flag, Options.local_addr.flag,
)  # fmt: skip
"""Options that differ between nodes."""
_INCOMPATIBLE_WITH_PROMPT: Mapping[Option[Any], str] = {
    Options.status: ": both need the terminal",
    Options.debug_rank: ": both need the terminal",
    Options.max_restarts: ": ranks wait for input",
    Options.hang_timeout: ": ranks wait for input",
    Options.report: "",
    Options.watch: "",
}
"""Options that cannot be used with a prompt, and why."""


def run(options: Options, invocation: Invocation) -> int:
    """Do what the options request, and return the exit code, or -n to end by signal n."""
    if options.where:
        from meshrun.cli.where import show_where

        return show_where(options)
    try:
        read.check_other_options(options)
        program = (read_check_program if options.check else read.read_program)(options)
        request = read.with_hosts(read.build_request(options, program), options)
        check_requirements(options, request)
        if _is_launch(options):
            _check_dry_run(options)
            _check_host(request, options.report)
    except MeshrunError as error:
        withdraw_if_launch(options, error)
        raise
    if request.console.is_json:
        from meshrun.console.lines import as_json_message

        set_message_format(as_json_message)
    if invocation.hosts_present or invocation.caller is None:  # not for launch()
        request = replace(request, notes=(*request.notes, *_misplaced(options, program)))
    if options.submit == "ray":
        from meshrun.cli.submit_job import launch_on_ray

        return launch_on_ray(options, request, invocation)
    if options.submit is not None:
        read.check_hosts(request, options)
        from meshrun.cli.submit_job import submit

        if invocation.caller is not None:
            raise UsageError(
                "--submit cannot be used with launch(), which returns the result of the ranks",
                hint=f"subprocess.run(['meshrun', '--submit', '{options.submit}', ...])",
            )
        return submit(options, request)
    if options.dry_run:
        _show_plan(options, request)
        return 0
    return _start(options, request, invocation)


def _is_launch(options: Options) -> bool:
    return not options.dry_run and options.submit is None


def _start(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Launch to measure, with a prompt, again after each change, or once."""
    if options.check:
        return check_mesh(options, request, lambda: _launch(options, request, invocation))
    if options.interactive:
        return _interact(options, request, invocation)
    if options.watch:
        from meshrun.cli.watch import watch_files

        return watch_files(options, request, invocation)
    return _launch(options, request, invocation)


def _launch(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Launch here, or on the hosts that the user or a scheduler names."""
    if options.per_task:
        from meshrun.cli.per_task import run_task_as_rank

        run_task_as_rank(options, request, invocation)
    cluster = None
    if not invocation.hosts_present:
        from meshrun import app

        request, cluster = app.ask_cluster(request, is_child=invocation.caller is not None)
        read.check_hosts(request, options)
        if invocation.caller is not None:
            _check_function(request)
    if request.remote is not None:
        _check_host(request, None)
        for text in request.rendezvous.notes:
            note(text)
        from meshrun.cli.on_hosts import launch_on_hosts

        return launch_on_hosts(options, request)
    return _launch_here(options, request, invocation, cluster)


def _check_function(request: LaunchRequest) -> None:
    """Refuse a function of launch() on other hosts, which lack it and keep what it returns."""
    from meshrun.worker.function import PROGRAM

    if request.program.target == PROGRAM and request.remote is not None:
        raise UsageError(
            "launch() runs a function on this host, but --hosts or --hostfile names others:"
            f" {', '.join(request.hosts)}",
            hint="launch a script, use meshrun.ray.launch(), or call launch() on each node without"
            " a list of hosts",
        )


def _check_host(request: LaunchRequest, report: str | None) -> None:
    """Check the working directory, the limit on descriptors and the path of the report."""
    from meshrun.supervisor.program_file import check_folder

    check_folder()
    allow_descriptors(_MIN_DESCRIPTORS + 4 * len(request.hosts))
    if report is not None:
        from meshrun.host.named_files import check_target

        check_target(report, Options.report.flag)


def _check_dry_run(options: Options) -> None:
    """Reject options of a dry run that are typed for a launch."""
    for row in _DRY_RUN_OPTIONS:
        if options.check and row in (Options.format, Options.output):
            continue
        if options.is_typed(row):
            hint = (
                "add --dry-run, or use --node-rank to number this node"
                if row is Options.rank
                else None
            )
            raise UsageError(f"{row.flag} requires --dry-run", hint=hint)


def _misplaced(options: Options, program: Program) -> Iterator[str]:
    """Yield a note for each option of meshrun after the program, unless the program reads it."""
    args, flags = options.line.program[1:], {row.flag: row for row in options.rows()}
    names = [name for name in misplaced(args, flags) if not options.is_typed(flags[name])]
    if not names:
        return
    source = read_source(program)
    for name in names:
        if source is None:
            is_known = name not in LAUNCHER_OPTIONS
        else:
            is_known = name[2:] in source or name[2:].replace("-", "_") in source
        if not is_known:
            yield f"passing {name} to the program; put options of meshrun before the program"


def _show_plan(options: Options, request: LaunchRequest) -> None:
    """Print what would be started."""
    from meshrun import app
    from meshrun.report.plan_output import print_plan
    from meshrun.supervisor.launch_gpus import examine_gpus

    request, cluster = app.ask_cluster(request)
    read.check_hosts(request, options)
    plan = app.plan(request, check_host=False, cluster=cluster)
    for text in plan.request.notes:
        note(text)
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
    if request.check_gpus:
        examine_gpus(plan, note)


def _launch_here(
    options: Options, request: LaunchRequest, invocation: Invocation, cluster: ClusterFacts | None
) -> int:
    """Launch the ranks of this node; return the exit code, or -n for the signal that ended them."""
    from meshrun import app
    from meshrun.console.console import Console
    from meshrun.report.progress import StartProgress

    rendezvous = request.rendezvous
    if rendezvous.step_of is not None:
        from meshrun.submit.srun_step import launch_on_nodes

        return launch_on_nodes(request, options.line.words(), job=rendezvous.step_of)
    if hosts := invocation.hosts_present:
        rendezvous = replace(rendezvous, present=len(hosts), hosts=hosts)
        # A warm server would end with the launch, as everything that a host's agent starts.
        request = replace(request, warm_idle_s=None)
    # An agent, a scheduler or a launch() on each node starts the others, not a command line.
    if invocation.caller is None and not _scheduler_starts_all(cluster, request):
        rendezvous = replace(rendezvous, join_command=command_for_others(options.line))
    request = replace(request, rendezvous=rendezvous)
    plan = app.plan(request, cluster=cluster)
    set_title("launcher", *sys.argv[1:])
    host = os.uname().nodename if invocation.is_quiet else ""
    console = Console(is_json=plan.request.console.is_json, host=host)
    progress = StartProgress(plan, console, quiet=invocation.is_quiet)
    result = app.launch(
        plan,
        console,
        invocation=invocation,
        watchers=[progress],
        report=lambda result: _report(options, invocation, plan, result, progress),
    )
    is_later_task = cluster is not None and cluster.task is not None and bool(cluster.node_rank)
    if plan.is_elastic and is_later_task:
        return 0  # srun returns the worst code of all nodes; node 0's is the launch's
    if result.signum is not None and not result.preempted:
        return -result.signum
    return returncode(request.exit_codes, result.exit_code, of_rank=True)


def _report(
    options: Options,
    invocation: Invocation,
    plan: LaunchPlan,
    result: LaunchResult,
    progress: StartProgress,
) -> None:
    """Report the end of a launch to the user, to a file, and to the parent process."""
    if invocation.caller is None:
        forward_error(result)
    if options.timings and not invocation.is_quiet:
        say(render_timings(result.timings))
    # Nodes that share a file system share the report, and node 0 knows the most. A caller
    # of launch() has a report of its own.
    knows_most = progress.is_first_node or (result.exit_code and not result.elsewhere)
    if options.report is not None and (knows_most or invocation.caller is not None):
        leave_report(result, options.report)
    if not _is_reported_elsewhere(result, plan, invocation):
        unseen, bare = progress.without_shown_lines(result), plan.request.console.prefix != "mesh"
        if text := render_failure(unseen, reported_lost=progress.reported_lost, bare=bare):
            say(text)
    if (task := invocation.task) is not None and not task.is_first:
        code = returncode(plan.request.exit_codes, result.exit_code, of_rank=True)
        task.report_end(code, is_over=bool(result.elsewhere))


def _is_reported_elsewhere(result: LaunchResult, plan: LaunchPlan, invocation: Invocation) -> bool:
    """Whether the caller, node 0 or the controller of all hosts reports the end."""
    is_stopped, caller = result.signum is not None, invocation.caller
    if is_stopped and caller is not None and caller.why_ended:
        return True
    is_first_lost = isinstance(result.trouble, NodeLostError)
    # Then the others continue, and the first one says without whom and why.
    leaves = plan.is_elastic and result.trouble is not None
    is_known = is_stopped or is_first_lost or leaves or bool(result.elsewhere)
    return invocation.is_quiet and is_known


def _scheduler_starts_all(cluster: ClusterFacts | None, request: LaunchRequest) -> bool:
    """Whether a scheduler starts the launchers of all nodes, so that nobody has to type them."""
    if cluster is None or cluster.node_rank is None or cluster.shell is not None:
        return False
    return cluster.nnodes is None or cluster.nnodes >= (request.nnodes or 1)


def withdraw_if_launch(options: Options, error: MeshrunError) -> None:
    """Withdraw because the options are invalid, if they say where to reach the other nodes."""
    if not _is_launch(options) or options.hosts or options.hostfile:  # it would start the others
        return
    try:
        rendezvous, nnodes = read.read_rendezvous(options)
    except MeshrunError:
        return
    if (nnodes or 1) > 1:
        from meshrun.supervisor.withdraw import withdraw

        withdraw(rendezvous, nnodes, error)


def command_for_others(line: CommandLine) -> str:
    """Return the command line for the other nodes, with ``ENDPOINT`` as a placeholder."""
    return f"meshrun --rdzv-endpoint ENDPOINT {shlex.join(line.words(without=_NODE_OPTIONS))}"


def _interact(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Start the ranks and a prompt whose input runs on every rank; return the exit code.

    Raises:
        UsageError: If another option makes no sense with a prompt.
    """
    flag, line = Options.interactive.flag, options.line
    if invocation.caller is not None:
        raise UsageError(f"{flag} cannot be used with launch()", hint="use meshrun.WorkerGroup")
    read.check_one_node(request, Options.interactive)
    if request.program.kind == "command":
        raise UsageError(f"{flag} requires a Python program, found `{request.program.target}`")
    for row, why in _INCOMPATIBLE_WITH_PROMPT.items():
        if options.is_typed(row):
            raise UsageError(f"{flag} cannot be used with {row.flag}{why}")
    set_title("prompt", *sys.argv[1:])
    from meshrun.api.prompt import run_prompt

    words = replace(line, program=()).words(without={flag})
    program = () if line.program[:1] in ((), ("-",)) else line.program
    return returncode(options.exit_code, run_prompt(words, program), of_rank=True)
