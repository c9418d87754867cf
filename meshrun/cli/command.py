"""The ``meshrun`` command: typer and the table of options -> parsed options."""

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
from meshrun.cli.end import call_at_end, end_by_signal, end_with
from meshrun.cli.option import COMMAND_LINE
from meshrun.cli.options import Options
from meshrun.cli.variables import BETWEEN_LAUNCHERS, IN_RANK
from meshrun.cli.words import CommandLine, requested_help, spell_out
from meshrun.errors import HostError, InternalError, MeshrunError, RendezvousError, UsageError
from meshrun.host.descriptors import is_lost_output, open_standard_streams
from meshrun.host.shortage import describe_shortage
from meshrun.host.stderr import discard_output, patient, say
from meshrun.plan.parse import parse_flag
from meshrun.protocol.caller import Invocation
from meshrun.protocol.step_end import report_end

_Table = TypeVar("_Table", bound=Options)
_LINE = "meshrun.line"
"""Key of the command line in ``ctx.meta``."""
_LAYOUT_VARIABLES = ("MESHRUN_SLOT_ORDER", "MESHRUN_NODES_PER_DOMAIN")
"""Variables of a rank's layout that no option has."""

# Depending on its version, typer bundles click or requires it from PyPI.
_TyperUsageError: Any = typer.BadParameter.__bases__[0]


class _AsWritten:
    """Leaves parsing to the table of options; typer's own conversion imports pydantic, 80 ms."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ARG002 - typer's signature
        """Return a text, a sequence of texts, or whether a switch is on."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if getattr(param, "is_flag", False) and isinstance(value, str):
            return parse_flag(value, str(param.envvar))
        return value


class _Command(TyperCommand):
    """Accepts options in every spelling that torchrun accepts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line, and keep its words for other processes."""
        takes_value: dict[str, bool] = {}
        torchrun_flags: set[str] = set()
        for parameter in self.params:
            if getattr(parameter, "_runtime_param", "") is None:  # only typer 0.29 has it
                parameter._runtime_param = _AsWritten()  # type: ignore[attr-defined]
            flags = [name for name in parameter.opts if name.startswith("-")]
            takes_value.update(dict.fromkeys(flags, not getattr(parameter, "is_flag", False)))
            torchrun_flags.update(flags if str(parameter.envvar).startswith("PET_") else ())
        spelled = spell_out(args, takes_value, torchrun_flags)
        words = spelled.words
        try:
            if spelled.error is not None:
                raise spelled.error
            rest = list(super().parse_args(ctx, list(words)))
        except (UsageError, _TyperUsageError) as error:
            if not ctx.resilient_parsing:
                self._notify_other_nodes(ctx, spelled.known, error)
            raise
        script, script_args = ctx.params["script"], ctx.params["args"] or ()
        program = () if script is None else (script, *script_args)
        before = tuple(words[: len(words) - len(program)])
        if program and before[-1:] == ("--",):
            before = before[:-1]
        ctx.meta[_LINE] = CommandLine(before, program, takes_value)
        return rest

    def _notify_other_nodes(self, ctx: Any, known: list[str], error: Exception) -> None:
        """Tell nodes that may wait for this one, according to ``known`` options, of an error."""
        options = _read_options(
            Options, self.make_context("meshrun", known, resilient_parsing=True, obj=ctx.obj)
        )
        from meshrun.cli.run import notify_other_nodes

        notify_other_nodes(options, _as_meshrun_error(error))


def _read_options(table: type[_Table], context: Any) -> _Table:
    """Return the options that typer found, each with its source."""
    sources = {}
    for row in table.rows():
        source = context.get_parameter_source(row.name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            is_typed = source.name == "COMMANDLINE"
            sources[row.name] = COMMAND_LINE if is_typed else str(row.variable)
    return table(context.params, sources, os.environ, context.meta[_LINE])


def make_app(table: type[Options]) -> typer.Typer:
    """Return an app with one command, whose options are the rows of ``table``."""

    def command(context: typer.Context, **_values: object) -> int | str:
        """Return an exit code, or a text to print."""
        options = _read_options(table, context)
        if (text := _information(options)) is not None:
            return text
        from meshrun.cli.run import run

        try:
            return run(options, context.obj)
        except MeshrunError as error:
            message = f"{getattr(error, 'option', '')} {error.message}"
            error.message += options.variables_behind(message)
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
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(
        cls=_Command,
        context_settings={"allow_interspersed_args": False},
        add_help_option=False,
    )(command)
    return app


def _information(options: Options) -> str | None:
    """Return the text to print for an option such as ``--version``, ``None`` without one."""
    text: str | None = None
    if options.help:
        from meshrun.cli.help import render_help

        text = render_help(type(options), requested_help(options.line))
    elif options.version:
        text = f"meshrun {__version__}"
    elif options.print_completion is not None:
        from meshrun.cli.completion import render_completion

        text = render_completion(options.print_completion, type(options))
    elif options.install_completion:
        from meshrun.cli.completion import install_completion

        text = install_completion(type(options), options.env)
    elif options.report_bug:
        from meshrun.cli.bug_report import render_bug_report

        text = render_bug_report(options)
    elif options.warm_status or options.warm_stop:
        from meshrun.report.warm_servers import render_servers, stop_servers

        text = stop_servers() if options.warm_stop else render_servers()
    return text


typer_app = make_app(Options)


def _print_error(error: MeshrunError) -> None:
    if not error.is_reported_elsewhere:
        from meshrun.report.message import render_error

        say(render_error(error, is_end=isinstance(error, RendezvousError)))


def run_command_line(
    invocation: Invocation, *, report_error: Callable[[MeshrunError], None] = _print_error
) -> NoReturn:
    """Run the command line of this process and exit with its code."""
    _open_streams()
    step = invocation.step
    if step and invocation.is_first_task:
        call_at_end(lambda code: report_end(step, code, is_first=True, is_over=True))
    foreign: list[str | None] = []
    if invocation.caller is None:
        foreign += BETWEEN_LAUNCHERS  # left over from another launch
    if IN_RANK in os.environ:
        # These are options of the launch around this one, or what it told its ranks.
        foreign += (*_LAYOUT_VARIABLES, *(row.variable for row in Options.rows()))
    for name in foreign:
        os.environ.pop(name or "", None)
    try:
        code = typer_app(standalone_mode=False, prog_name="meshrun", obj=invocation)
        if isinstance(code, str):  # printed here, as typer exits with 1 on a broken pipe
            print(code)
            code = 0
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        code = end_by_signal(signal.SIGINT)
    except BrokenPipeError:
        discard_output(sys.stdout)
        code = end_by_signal(signal.SIGPIPE)
    except Exception as caught:
        error = _as_meshrun_error(caught)
        report_error(error)
        code = error.exit_code
    end_with(code if isinstance(code, int) else 0)


def _as_meshrun_error(error: Any) -> MeshrunError:
    """Return an error to report for any exception, whose traceback is printed if it is a bug."""
    if isinstance(error, MeshrunError):
        return error
    if isinstance(error, _TyperUsageError):
        message = error.format_message().partition(" (Possible")[0].rstrip(".")
        return UsageError(message[:1].lower() + message[1:], hint="see `meshrun --help`")
    if is_lost_output(error):
        discard_output(sys.stdout)
        return HostError(f"cannot write the output: {error.strerror}")
    if (shortage := describe_shortage(error)) is not None:
        return shortage
    if _met_a_shadow(error):
        return UsageError(
            f"{error.path} is imported in place of Python's `{error.name}`",
            hint="rename it, or remove its folder from PYTHONPATH",
        )
    traceback.print_exception(error)
    return InternalError(
        f"this is a bug in meshrun: {error}",
        hint="please report it with the traceback above and the output of --report-bug",
    )


def _met_a_shadow(error: Exception) -> bool:
    """Whether a file of the user's was imported that has the name of a module of Python."""
    if not isinstance(error, ImportError) or error.name not in sys.stdlib_module_names:
        return False
    from meshrun.host.users_files import is_users_file

    return error.path is not None and is_users_file(error.path)


def _open_streams() -> None:
    """Open standard streams that are closed (``2>&-``) on the null device; lose no output."""
    open_standard_streams()
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the whole process
    sys.stdout = patient(sys.stdout or open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stderr = patient(sys.stderr or open(2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
