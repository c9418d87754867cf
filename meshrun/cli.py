"""The command line: flags -> LaunchRequest. The only typer importer and the only sys.exit."""

from __future__ import annotations

import enum
import os
import signal
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from meshrun import __version__
from meshrun.errors import InternalError, MeshrunError, UsageError
from meshrun.host.descriptors import open_standard_streams
from meshrun.plan import LaunchRequest, Program
from meshrun.report.message import render_error
from meshrun.spec import MeshSpec, parse_mesh
from meshrun.words import spell_out

_MESH, _PROGRAM, _WORKERS, _OUTPUT, _END = "Mesh", "Program", "Workers", "Look first", "End"


_MOST_SECONDS = 10_000_000


class Format(str, enum.Enum):
    """How a dry run is printed."""

    text = "text"
    json = "json"


class Method(str, enum.Enum):
    """How ranks are started."""

    fork = "fork"
    exec = "exec"


# typer carries its own click, or needs the one on PyPI, depending on its version.
_UsageErrorOfTyper: Any = typer.BadParameter.__bases__[0]


class _Command(TyperCommand):
    """Reads options in all the spellings that torchrun knows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {"--help": False, "-h": False}
        for parameter in self.params:
            flag = getattr(parameter, "is_flag", False)
            options.update({name: not flag for name in parameter.opts if name.startswith("-")})
        return list(super().parse_args(ctx, spell_out(args, options)))


app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(
    cls=_Command,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
def command(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(help="The program: a Python file, or a module with -m.")
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, passed on untouched.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Shape of the mesh: dp=2,tp=4 or 2x4. The right dim is fastest, as in torch."
            " One size may be -1.",
            rich_help_panel=_MESH,
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Names for the dims of a 2x4 mesh.", rich_help_panel=_MESH
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="auto, cpu, cuda or another torch device type. auto takes the accelerator"
            " where there are enough, else cpu.",
            rich_help_panel=_MESH,
        ),
    ] = "auto",
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Workers on each node; as many as the mesh needs if left out.",
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of nodes; 1 if left out.", rich_help_panel=_WORKERS),
    ] = None,
    start_method: Annotated[
        Method | None,
        typer.Option(
            help="fork imports torch once a node; exec gives each rank a fresh interpreter.",
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Import this once a node too, before the ranks are forked; repeatable.",
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    module: Annotated[
        bool,
        typer.Option(
            "-m", "--module", help="Run a module, as python -m does.", rich_help_panel=_PROGRAM
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            "-n",
            help="Print who sits where and start nothing.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    output_format: Annotated[
        Format, typer.Option("--format", help="How a dry run is printed.", rich_help_panel=_OUTPUT)
    ] = Format.text,
    every_row: Annotated[
        bool,
        typer.Option("--all", help="Print every worker of a large plan.", rich_help_panel=_OUTPUT),
    ] = False,
    no_prefix: Annotated[
        bool,
        typer.Option(
            "--no-prefix",
            help="Print ranks' lines without their coordinates.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    timings: Annotated[
        bool,
        typer.Option(
            "--timings", help="Say at the end where the time went.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long ranks may take to end once they are told to.",
            rich_help_panel=_END,
        ),
    ] = 30.0,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int:
    """Launch a PyTorch program on every device and hand it a ready DeviceMesh.

    meshrun --mesh 2x4 --names dp,tp train.py --lr 1e-3

    In train.py, `from meshrun import current_mesh` and `mesh = current_mesh()` give the
    torch.distributed DeviceMesh that was built before its first line.
    """
    if version:
        print(f"meshrun {__version__}")
        return 0
    if script is None:
        raise UsageError("no program was given", hint="meshrun --mesh dp=2 train.py")
    if not 0 <= shutdown_timeout < _MOST_SECONDS:
        raise UsageError(
            f"--shutdown-timeout is from 0 to {_MOST_SECONDS:,} seconds, found {shutdown_timeout:g}"
        )
    request = LaunchRequest(
        program=Program(
            kind="module" if module else "script", target=script, args=tuple(args or ())
        ),
        mesh=_mesh(mesh, names),
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        device=device,
        start_method=start_method.value if start_method else None,
        shutdown_timeout_s=shutdown_timeout,
        prefix=not no_prefix,
        preload=("torch", "torch.distributed.device_mesh", *(preload or ())),
    )
    if dry_run:
        _print_plan(request, output_format, every_row)
        return 0
    return _launch(request, show_timings=timings, began_ns=context.obj)


def run_command_line(*, began_ns: int) -> NoReturn:
    """Run the command line of this process and exit with its code."""
    _open_streams()
    try:
        code = app(standalone_mode=False, prog_name="meshrun", obj=began_ns)
    except MeshrunError as error:
        print(render_error(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except _UsageErrorOfTyper as error:
        print(render_error(_usage_error(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _end_by_signal(signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end_by_signal(signal.SIGPIPE)
    except Exception as error:
        traceback.print_exc()
        bug = InternalError(f"this is a bug in meshrun: {error}", hint="please report the above")
        print(render_error(bug), file=sys.stderr)
        sys.exit(bug.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Give Python streams that were closed (``2>&-``) somewhere to write to."""
    open_standard_streams()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _mesh(mesh: str | None, names: str | None) -> MeshSpec | None:
    if mesh is None:
        if names is not None:
            raise UsageError("--names was given without --mesh", hint=f"--mesh 2x4 --names {names}")
        return None
    return parse_mesh(mesh, names)


def _print_plan(request: LaunchRequest, output_format: Format, every_row: bool) -> None:
    from meshrun import app as use_cases

    plan = use_cases.plan(request, check_host=False)
    if output_format is Format.json:
        from meshrun.report.as_json import render_plan_json

        print(render_plan_json(plan))
        return
    from meshrun.report.dry_run import print_dry_run

    print_dry_run(plan, every_row=every_row)


def _launch(request: LaunchRequest, *, show_timings: bool, began_ns: int) -> int:
    from meshrun import app as use_cases
    from meshrun.report.failure import render_failure
    from meshrun.report.progress import StartProgress

    plan = use_cases.plan(request)
    if plan.layout.nnodes > 1:
        raise UsageError(
            f"{plan.layout.nnodes} nodes were asked for, and this version launches on one",
            hint="--dry-run plans any number of nodes",
        )
    result = use_cases.launch(plan, watch=StartProgress(plan), began_ns=began_ns)
    if show_timings:
        from meshrun.report.timings import render_timings

        print(render_timings(result.timings), file=sys.stderr)
    if text := render_failure(result):
        print(text, file=sys.stderr)
    if result.signum is not None:
        _end_by_signal(result.signum)
    return result.exit_code


def _end_by_signal(signum: int) -> None:
    """End as the signal would have, so that the shell sees the truth."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _usage_error(error: Any) -> UsageError:
    message = error.format_message().partition(" (Possible")[0].rstrip(".")
    message = message[:1].lower() + message[1:]
    possible = getattr(error, "possibilities", None)
    hint = " or ".join(f"`{name}`" for name in possible) + "?" if possible else None
    return UsageError(message, hint=hint or "see `meshrun --help`")
