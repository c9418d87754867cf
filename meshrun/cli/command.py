"""The command line: flags -> LaunchRequest. The only sys.exit."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from meshrun import __version__
from meshrun.cli import host_options as on
from meshrun.cli import own_options, torchrun_options
from meshrun.cli.option_kinds import NO_VALUE
from meshrun.cli.parsed_options import COMMAND_LINE, Asked, build_request, check_accepted
from meshrun.cli.program_options import read_program
from meshrun.cli.run import (
    Began,
    end_by_signal,
    give_up,
    launch_here,
    launch_on_hosts,
    show_plan,
)
from meshrun.cli.words import LAUNCHERS, CommandLine, misplaced, spell_known, spell_out
from meshrun.errors import HostError, InternalError, MeshrunError, RendezvousError, UsageError
from meshrun.host.descriptors import (
    allow_descriptors,
    is_lost_output,
    let_go_of,
    open_standard_streams,
    say,
)
from meshrun.plan.parse import parse_choice, parse_flag
from meshrun.plan.request import LaunchRequest, Program
from meshrun.report.message import render_error
from meshrun.supervisor.program_file import read_source

_FEWEST_FILES = 64
"""What a launch has open on its way to being one."""
_LINE = "meshrun.line"
"""Where a context keeps its command line."""
_SET_BY_A_LAUNCH = (
    *("MESHRUN_MESH", "MESHRUN_DEVICE"),
    *("MESHRUN_FLATTEN", "MESHRUN_VIEW", "MESHRUN_SLOT_ORDER"),
    *("MESHRUN_BACKEND", "MESHRUN_TIMEOUT", "MESHRUN_PG_OPT"),
)
"""Variables that describe a rank to its program, and would be options of a launch inside it."""
_OF_A_DRY_RUN = {
    "format": "how a dry run is printed",
    "output": "where a dry run goes",
    "rank": "what a dry run is to show",
    "color_dim": "how a dry run is coloured",
    "all": "how much a dry run shows",
}
_NO_PART_OF_A_PLAN = ("script", "args", "dry_run", "format", "output", "color_dim", "rank", "all")

# typer carries its own click, or needs the one on PyPI, depending on its version.
_UsageErrorOfTyper: Any = typer.BadParameter.__bases__[0]


class _AsWritten:
    """Leaves values as they are, for ``asked`` to read; typer's own way imports pydantic, 80 ms."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ARG002 - typer's signature
        """Return a text, a list of them, or whether a switch is on."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if getattr(param, "is_flag", False) and isinstance(value, str):
            return parse_flag(value, str(param.envvar))
        return value


class _Command(TyperCommand):
    """Reads options in all the spellings that torchrun knows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {"--help": False, "-h": False}
        torchruns = set()
        for parameter in self.get_params(ctx):
            flag = getattr(parameter, "is_flag", False)
            options.update({name: not flag for name in parameter.opts if name.startswith("-")})
            if getattr(parameter, "_runtime_param", "") is None:  # typer 0.29; others have none
                parameter._runtime_param = _AsWritten()  # type: ignore[attr-defined]
            if str(parameter.envvar).startswith("PET_"):
                torchruns.update(parameter.opts)
        try:
            words = spell_out(args, options, torchruns)
            rest = list(super().parse_args(ctx, list(words)))
        except (UsageError, _UsageErrorOfTyper) as error:
            if not ctx.resilient_parsing:
                known = spell_known(args, options, torchruns)
                self._tell_others(ctx, known, error)
            raise
        typed = (ctx.params["script"], *(ctx.params["args"] or ()))  # with all that follows it
        program = typed if typed[0] is not None else ()
        before = tuple(words[: len(words) - len(program)])
        if program and before[-1:] == ("--",):
            before = before[:-1]
        ctx.meta[_LINE] = CommandLine(before, program, options)
        return rest

    def _tell_others(self, ctx: Any, known: list[str], error: Exception) -> None:
        """Other nodes may wait for this one, whose command line cannot be read in full."""
        read: Any = self.make_context("meshrun", known, resilient_parsing=True, obj=ctx.obj)
        if not (read.params["dry_run"] or read.params["submit"]):
            usage = error if isinstance(error, UsageError) else _usage_error(error)
            give_up(Asked(read.params, _sources(read), os.environ), usage)


app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(
    cls=_Command,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    epilog="Each option is read from the environment too: MESHRUN_MESH, MESHRUN_SHOW and so on for"
    " meshrun's own, PET_NPROC_PER_NODE and so on for torchrun's. --dry-run says which counted.",
)
def command(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(help="The program: a Python file, or a module with -m.")
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, passed on untouched.")
    ] = None,
    mesh: own_options.Mesh = None,
    names: own_options.Names = None,
    device: own_options.Device = None,
    flatten: own_options.Flatten = None,
    view: own_options.View = None,
    intra_node: own_options.IntraNode = None,
    place: own_options.Place = None,
    backend: own_options.Backend = None,
    timeout: own_options.Timeout = None,
    pg_opt: own_options.PgOpt = None,
    mesh_init: own_options.MeshInit = None,
    nproc_per_node: torchrun_options.Nproc = None,
    nnodes: torchrun_options.Nnodes = None,
    numa_binding: torchrun_options.NumaBinding = None,
    virtual_local_rank: torchrun_options.VirtualLocalRank = False,
    role: torchrun_options.Role = None,
    hosts: on.Hosts = None,
    hostfile: on.Hostfile = None,
    include: on.Include = None,
    exclude: on.Exclude = None,
    export: on.Export = None,
    ssh: on.Ssh = None,
    connect_timeout: on.ConnectTimeout = None,
    module: torchrun_options.Module = False,
    no_python: torchrun_options.NoPython = False,
    run_path: torchrun_options.RunPath = False,
    preload: own_options.Preload = None,
    start_method: torchrun_options.StartMethod = None,
    dry_run: own_options.DryRun = False,
    format: own_options.Format = None,  # noqa: A002 - parameters are named as their options
    output: own_options.Output = None,
    color_dim: own_options.ColorDim = None,
    rank: own_options.Rank = None,
    all: own_options.All = False,  # noqa: A002
    submit: own_options.Submit = None,
    submit_arg: own_options.SubmitArg = None,
    image: own_options.Image = None,
    timings: own_options.Timings = False,
    verbose: own_options.Verbose = False,
    show: own_options.Show = None,
    hide: own_options.Hide = None,
    collapse: own_options.Collapse = False,
    prefix: own_options.Prefix = None,
    no_prefix: own_options.NoPrefix = False,
    status: own_options.Status = False,
    status_interval: own_options.StatusInterval = None,
    debug_rank: own_options.DebugRank = None,
    console: own_options.Console = None,
    log_line_prefix_template: torchrun_options.Template = None,
    local_ranks_filter: torchrun_options.LocalRanksFilter = None,
    max_restarts: torchrun_options.MaxRestarts = None,
    start_timeout: own_options.StartTimeout = None,
    hang_timeout: own_options.HangTimeout = None,
    node_timeout: own_options.NodeTimeout = None,
    shutdown_timeout: torchrun_options.ShutdownTimeout = None,
    forward: own_options.Forward = None,
    signals_to_handle: torchrun_options.SignalsToHandle = None,
    exit_code: own_options.ExitCode = None,
    report: own_options.Report = None,
    redirects: torchrun_options.Redirects = None,
    tee: torchrun_options.Tee = None,
    log_dir: torchrun_options.LogDir = None,
    allow_shared_log_dir: own_options.AllowSharedLogDir = False,
    duplicate_stdout_filters: torchrun_options.StdoutFilters = None,
    duplicate_stderr_filters: torchrun_options.StderrFilters = None,
    logs_specs: torchrun_options.LogsSpecs = None,
    event_log_handler: torchrun_options.EventHandler = None,
    standalone: torchrun_options.Standalone = False,
    rdzv_backend: torchrun_options.RdzvBackend = None,
    rdzv_endpoint: torchrun_options.RdzvEndpoint = None,
    rdzv_id: torchrun_options.RdzvId = None,
    rdzv_conf: torchrun_options.RdzvConf = None,
    node_rank: torchrun_options.NodeRank = None,
    master_addr: torchrun_options.MasterAddr = None,
    master_port: torchrun_options.MasterPort = None,
    local_addr: torchrun_options.LocalAddr = None,
    allow_different_programs: own_options.AllowDifferentPrograms = False,
    monitor_interval: torchrun_options.MonitorInterval = None,
    exit_barrier_timeout: torchrun_options.ExitBarrierTimeout = None,
    print_completion: torchrun_options.PrintCompletion = None,
    version: Annotated[
        bool, typer.Option("--version", metavar=NO_VALUE, help="Print the version.")
    ] = False,
) -> int:
    """Launch a PyTorch program on every device and hand it a ready DeviceMesh.

    meshrun --mesh 2x4 --names dp,tp train.py --lr 1e-3

    In train.py, `from meshrun import current_mesh` and `mesh = current_mesh()` give the
    torch.distributed DeviceMesh that was built before its first line.

    Without --mesh it does what torchrun does.
    """
    if version:
        print(f"meshrun {__version__}")
        return 0
    if print_completion is not None:
        from meshrun.cli.completion import render_completion

        print(render_completion(print_completion, context.command.params))
        return 0
    names_in_help_order = (str(each.name) for each in context.command.params)
    in_help_order = {name: context.params.get(name) for name in names_in_help_order}
    asked = Asked(in_help_order, _sources(context), os.environ)
    line: CommandLine = context.meta[_LINE]
    is_launch = not dry_run and submit is None
    with _telling_others(asked) if is_launch else nullcontext():
        check_accepted(asked)
        program = read_program(asked)
        request = on.on_hosts(build_request(asked, program), asked)
        if is_launch:
            _check_dry_run(context)
            _check_host(request, report)
    # launch() knows which are the program's
    if context.obj.conducted or context.obj.caller is None:
        request = replace(request, told=(*request.told, *_misplaced(asked, program, line)))
    if submit is not None:
        from meshrun.cli.submit import submit as submit_job

        if context.obj.caller is not None:
            raise UsageError(
                "--submit with launch(): it says what came of the ranks, and a job's start later",
                hint=f"subprocess.run(['meshrun', '--submit', '{submit}', ...]) hands it in",
            )
        return submit_job(submit, asked, request, line, dry_run=dry_run, output=output)
    output_format = parse_choice(format or "text", "--format", ("text", "json", "svg"))
    if dry_run:
        show_plan(
            request, output_format, every_row=all, output=output, color_dim=color_dim, rank=rank
        )
        return 0
    if request.remote is not None:
        return launch_on_hosts(request, line, version=__version__, report=report)
    return launch_here(request, line, show_timings=timings, report=report, began=context.obj)


def _tell(error: MeshrunError) -> None:
    if not error.is_told:
        say(render_error(error, is_end=isinstance(error, RendezvousError)))


def run_command_line(began: Began, *, tell: Callable[[MeshrunError], None] = _tell) -> NoReturn:
    """Run the command line of this process and exit with its code.

    Args:
        began: How this process came to be.
        tell: Called with an error that kept the launch from being made.
    """
    _open_streams()
    if "MESHRUN_GENERATION" in os.environ:
        for name in _SET_BY_A_LAUNCH:
            os.environ.pop(name, None)
    try:
        code = app(standalone_mode=False, prog_name="meshrun", obj=began)
        sys.stdout.flush()
    except MeshrunError as error:
        tell(error)
        sys.exit(error.exit_code)
    except _UsageErrorOfTyper as error:
        tell(_usage_error(error))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        end_by_signal(signal.SIGINT)
    except BrokenPipeError:
        let_go_of(sys.stdout)
        end_by_signal(signal.SIGPIPE)
    except Exception as error:
        if is_lost_output(error):
            let_go_of(sys.stdout)
            lost = HostError(f"output cannot be written: {error.strerror}")
            tell(lost)
            sys.exit(lost.exit_code)
        traceback.print_exc()
        bug = InternalError(f"this is a bug in meshrun: {error}", hint="please report the above")
        tell(bug)
        sys.exit(bug.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _telling_others(asked: Asked) -> Iterator[None]:
    try:
        yield
    except MeshrunError as error:
        give_up(asked, error)
        raise


def _open_streams() -> None:
    """Give Python streams that were closed (``2>&-``) somewhere to write to."""
    open_standard_streams()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _sources(context: typer.Context) -> dict[str, str]:
    """Return where each option that was given came from."""
    sources = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or name in _NO_PART_OF_A_PLAN:
            continue
        if source.name == "COMMANDLINE":
            sources[name] = COMMAND_LINE
        elif source.name == "ENVIRONMENT":
            sources[name] = str(parameter.envvar)
    return sources


def _check_host(request: LaunchRequest, report: str | None) -> None:
    """Check that this process may open what it has to.

    Raises:
        MeshrunError: If not.
    """
    allow_descriptors(_FEWEST_FILES + 4 * len(request.hosts))
    if report is not None:
        from meshrun.host.whole_file import check_target

        check_target(report, "--report")


def _check_dry_run(context: typer.Context) -> None:
    """Say what is typed for a dry run alone, where there is none.

    Raises:
        UsageError: With the option.
    """
    for name, what in _OF_A_DRY_RUN.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = "; --node-rank says which node this is" if name == "rank" else ""
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is {what}", hint=f"add --dry-run{hint}")


def _misplaced(asked: Asked, program: Program, line: CommandLine) -> Iterator[str]:
    """What is meshrun's before the program, and after it is the program's, for people."""
    names = [
        name
        for name in misplaced(line.program[1:], line.takes_value)
        if not asked.is_typed(name[2:].replace("-", "_"))
    ]
    source = read_source(program) if names else None
    for name in names:
        words = {name[2:], name[2:].replace("-", "_")}
        is_known = name not in LAUNCHERS if source is None else any(map(source.__contains__, words))
        if not is_known:
            yield f"`{name}` after the program is the program's; meshrun's options come before it"


def _usage_error(error: Any) -> UsageError:
    message = error.format_message().partition(" (Possible")[0].rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint="see `meshrun --help`")
