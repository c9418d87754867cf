"""The command line: typer and the table of options -> parsed options."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand

from meshrun import __version__
from meshrun.cli.began import Began
from meshrun.cli.end import end_by_signal, end_with, tell_end_by
from meshrun.cli.option import COMMAND_LINE
from meshrun.cli.options import Options
from meshrun.cli.words import CommandLine, asked_help, spell_known, spell_out
from meshrun.errors import HostError, InternalError, MeshrunError, RendezvousError, UsageError
from meshrun.host.descriptors import is_lost_output, let_go_of, open_standard_streams, say
from meshrun.plan.parse import parse_flag
from meshrun.protocol.step_end import report_end

_Table = TypeVar("_Table", bound=Options)
_LINE = "meshrun.line"
"""Where a context keeps its command line."""
_OF_A_LAYOUT = ("MESHRUN_SLOT_ORDER", "MESHRUN_NODES_PER_DOMAIN")
"""Variables of a rank that no option has."""

# typer carries its own click, or needs the one on PyPI, depending on its version.
_UsageErrorOfTyper: Any = typer.BadParameter.__bases__[0]


class _AsWritten:
    """Leaves values as they are, for the table to read; typer's own way imports pydantic, 80 ms."""

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
        takes_value: dict[str, bool] = {}
        torchruns: set[str] = set()
        for parameter in self.params:
            if getattr(parameter, "_runtime_param", "") is None:  # typer 0.29; others have none
                parameter._runtime_param = _AsWritten()  # type: ignore[attr-defined]
            flags = [name for name in parameter.opts if name.startswith("-")]
            takes_value.update(dict.fromkeys(flags, not getattr(parameter, "is_flag", False)))
            torchruns.update(flags if str(parameter.envvar).startswith("PET_") else ())
        try:
            words = spell_out(args, takes_value, torchruns)
            rest = list(super().parse_args(ctx, list(words)))
        except (UsageError, _UsageErrorOfTyper) as error:
            if not ctx.resilient_parsing:
                self._tell_others(ctx, spell_known(args, takes_value, torchruns), error)
            raise
        typed = (ctx.params["script"], *(ctx.params["args"] or ()))  # with all that follows it
        program = typed if typed[0] is not None else ()
        before = tuple(words[: len(words) - len(program)])
        if program and before[-1:] == ("--",):
            before = before[:-1]
        ctx.meta[_LINE] = CommandLine(before, program, takes_value)
        return rest

    def _tell_others(self, ctx: Any, known: list[str], error: Exception) -> None:
        """Other nodes may wait for this one, whose command line cannot be read in full."""
        options = _read_options(
            Options, self.make_context("meshrun", known, resilient_parsing=True, obj=ctx.obj)
        )
        if not (options.dry_run or options.submit):
            from meshrun.cli.run import give_up

            give_up(options, error if isinstance(error, UsageError) else _usage_error(error))


def _read_options(table: type[_Table], context: Any) -> _Table:
    """Return what typer found, and where."""
    sources = {}
    for row in table.rows():
        source = context.get_parameter_source(row.name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            is_typed = source.name == "COMMANDLINE"
            sources[row.name] = COMMAND_LINE if is_typed else str(row.variable)
    return table(context.params, sources, os.environ)


def make_app(table: type[Options]) -> typer.Typer:
    """Return the command whose options are the rows of a table."""

    def command(context: typer.Context, **_values: object) -> int | str:
        """Return an exit code, or what to print."""
        options, line = _read_options(table, context), context.meta[_LINE]
        if (told := _tell_of(table, options, line)) is not None:
            return told
        from meshrun.cli.run import run

        try:
            return run(options, line, context.obj)
        except MeshrunError as error:
            error.message += options.behind(f"{getattr(error, 'option', '')} {error.message}")
            if options.exit_code == "torchrun" and error.exit_code != UsageError.exit_code:
                error.exit_code = 1
            raise

    hints: dict[str, Any] = {
        "context": typer.Context,
        "script": Annotated[str | None, typer.Argument()],
        "args": Annotated[list[str] | None, typer.Argument()],
    }
    defaults: dict[str, Any] = {"context": Parameter.empty}
    for row in table.rows():
        kind = bool if not row.takes_value else list[str] | None if row.repeats else str | None
        hints[row.name] = Annotated[kind, typer.Option(*row.flags, envvar=row.variable)]
        defaults[row.name] = None if row.takes_value else False
    command.__annotations__ = {**hints, "return": int | str}
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=hint)
            for name, hint in hints.items()
        ]
    )
    made = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    made.command(
        cls=_Command,
        context_settings={"allow_interspersed_args": False},
        add_help_option=False,
    )(command)
    return made


def _tell_of(table: type[Options], options: Options, line: CommandLine) -> str | None:
    """Return what to print where no launch, and no plan of one, is asked for."""
    told: str | None = None
    if options.help:
        from meshrun.cli.help import render_help

        told = render_help(table, asked_help(line))
    elif options.version:
        told = f"meshrun {__version__}"
    elif options.print_completion is not None:
        from meshrun.cli.completion import render_completion

        told = render_completion(options.print_completion, table)
    elif options.install_completion:
        from meshrun.cli.install_completion import install_completion

        told = install_completion(table, os.environ)
    elif options.report_bug:
        from meshrun.cli.bug_report import render_bug_report

        told = render_bug_report(options, line)
    elif options.warm_status or options.warm_stop:
        from meshrun.report.warm_servers import render_servers, stop_servers

        told = stop_servers() if options.warm_stop else render_servers()
    return told


typer_app = make_app(Options)


def _tell(error: MeshrunError) -> None:
    if not error.is_told:
        from meshrun.report.message import render_error

        say(render_error(error, is_end=isinstance(error, RendezvousError)))


def run_command_line(began: Began, *, tell: Callable[[MeshrunError], None] = _tell) -> NoReturn:
    """Run the command line of this process and exit with its code.

    Args:
        began: How this process came to be.
        tell: Called with an error that kept the launch from being made.
    """
    _open_streams()
    _tell_step(began)
    if "MESHRUN_GENERATION" in os.environ:
        # Options of the launch around this one, or what it says to its ranks: none of them is ours.
        for name in (*_OF_A_LAYOUT, *(row.variable for row in Options.rows())):
            os.environ.pop(name or "", None)
    try:
        code = typer_app(standalone_mode=False, prog_name="meshrun", obj=began)
        if isinstance(code, str):  # here typer does not see a broken pipe, of which it makes a 1
            print(code)
            code = 0
        sys.stdout.flush()
    except MeshrunError as error:
        tell(error)
        end_with(error.exit_code)
    except _UsageErrorOfTyper as error:
        tell(_usage_error(error))
        end_with(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        end_by_signal(signal.SIGINT)
    except BrokenPipeError:
        let_go_of(sys.stdout)
        end_by_signal(signal.SIGPIPE)
    except Exception as error:
        if is_lost_output(error):
            let_go_of(sys.stdout)
            lost = HostError(f"cannot write the output: {error.strerror}")
            tell(lost)
            end_with(lost.exit_code)
        traceback.print_exc()
        bug = InternalError(
            f"this is a bug in meshrun: {error}",
            hint="please report it with the traceback above and the output of --report-bug",
        )
        tell(bug)
        end_with(bug.exit_code)
    end_with(code if isinstance(code, int) else 0)


def _tell_step(began: Began) -> None:
    """Have the first launcher of a step tell the exit code of the launch."""
    if began.step and began.is_first_task:
        tell_end_by(lambda code: report_end(began.step, code, is_first=True, is_over=True))


def _open_streams() -> None:
    """Give Python streams that were closed (``2>&-``) something to read, or to write to."""
    open_standard_streams()
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for the whole process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _usage_error(error: Any) -> UsageError:
    message = error.format_message().partition(" (Possible")[0].rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint="see `meshrun --help`")
