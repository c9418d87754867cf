"""The ``meshrun`` command: a command line and the environment -> parsed options."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from meshrun import __version__
from meshrun.cli.end import call_at_end, end_by_signal, end_with, returncode
from meshrun.cli.option import COMMAND_LINE, PET
from meshrun.cli.options import CONTROLLER_OPTIONS, Options, forget_variables
from meshrun.cli.words import CommandLine, requested_help, spell_out
from meshrun.errors import HostError, InternalError, MeshrunError, RendezvousError, UsageError
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import is_lost_output
from meshrun.host.own_variables import BETWEEN_LAUNCHERS
from meshrun.host.shortage import describe_shortage
from meshrun.host.stderr import discard_output, patient, say
from meshrun.plan.parse import is_on, parse_flag
from meshrun.protocol.caller import Invocation

_Table = TypeVar("_Table", bound=Options)


def read_options(table: type[_Table], args: Sequence[str]) -> _Table:
    """Return the options on a command line, in every spelling of torchrun's, and in variables.

    If they are invalid, this node withdraws from the launch, as far as the line says where it is.

    Raises:
        UsageError: If an option is unknown, lacks its value or takes none, or if the variable of a
            switch is neither true nor false.
    """
    takes_value = {flag: row.takes_value for row in table.rows() for flag in row.flags}
    torchruns = {row.flag for row in table.rows() if row.family == PET or row is table.help}
    line, wrong = spell_out(args, takes_value, torchruns)
    try:
        if wrong is not None:
            raise wrong
        return _add_variables(table, line)
    except UsageError as error:
        from meshrun.cli.run import withdraw_if_launch

        withdraw_if_launch(_add_variables(table, line, is_partial=True), error)
        raise


def _add_variables(table: type[_Table], line: CommandLine, *, is_partial: bool = False) -> _Table:
    rows = {flag: row for row in table.rows() for flag in row.flags}
    values: dict[str, Any] = {}
    for flag, text in line.options:
        if (row := rows[flag]).repeats:
            values.setdefault(row.name, []).append(text)
        else:
            values[row.name] = text if row.takes_value else True
    sources = dict.fromkeys(values, COMMAND_LINE)
    for row in table.rows():
        name = row.variable
        if row.name in values or name is None or not (text := os.environ.get(name)):
            continue
        if not row.takes_value:
            values[row.name] = is_on(text) if is_partial else parse_flag(text, name)
        else:
            values[row.name] = text.split() if row.repeats else text
        sources[row.name] = name
    return table(values, sources, os.environ, line)


def run_line(args: Sequence[str], invocation: Invocation) -> int:
    """Run a command line and return the exit code."""
    options = read_options(Options, args)
    if (text := _information(options)) is not None:
        print(text)
        return 0
    from meshrun.cli.run import run

    try:
        code = run(options, invocation)
    except MeshrunError as error:
        message = f"{getattr(error, 'option', '')} {error.message}"
        error.message += options.variables_behind(message)
        error.exit_code = returncode(options.exit_code, error.exit_code)
        raise
    code = returncode(options.exit_code, code)
    return code if code >= 0 else end_by_signal(-code)


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
        from meshrun.cli.where import render_bug_report

        text = render_bug_report(options)
    elif options.warm_status or options.warm_stop:
        from meshrun.report.warm_servers import render_servers, stop_servers

        text = stop_servers() if options.warm_stop else render_servers()
    return text


def _print_error(error: MeshrunError) -> None:
    if not error.is_reported_elsewhere:
        from meshrun.report.result_text import render_error

        say(render_error(error, is_end=isinstance(error, RendezvousError)))


def run_command_line(
    invocation: Invocation, *, report_error: Callable[[MeshrunError], None] = _print_error
) -> NoReturn:
    """Run the command line of this process and exit with its code."""
    # Make objects for standard streams that were closed (``2>&-``), and lose no output.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the whole process
    sys.stdout = patient(sys.stdout or open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stderr = patient(sys.stderr or open(2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    if (task := invocation.task) is not None and task.is_first:
        call_at_end(partial(task.report_end, is_over=True))
    foreign = [*BETWEEN_LAUNCHERS] if invocation.caller is None else []  # left over from another
    if var.GENERATION in os.environ:
        foreign += var.OF_LAYOUT
        forget_variables(Options.rows())  # of the launch around this one
    if invocation.hosts_present:
        forget_variables(CONTROLLER_OPTIONS)
    for name in foreign:
        os.environ.pop(name, None)
    try:
        code = run_line(sys.argv[1:], invocation)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = end_by_signal(signal.SIGINT)
    except BrokenPipeError:
        discard_output(sys.stdout)
        code = end_by_signal(signal.SIGPIPE)
    except Exception as caught:
        error = _as_meshrun_error(caught)
        report_error(error)
        code = error.exit_code
    end_with(code)


def _as_meshrun_error(error: Any) -> MeshrunError:
    """Return an error to report for any exception, whose traceback is printed if it is a bug."""
    if isinstance(error, MeshrunError):
        return error
    if is_lost_output(error):
        discard_output(sys.stdout)
        return HostError(f"cannot write the output: {error.strerror}")
    if (shortage := describe_shortage(error)) is not None:
        return shortage
    if isinstance(error, ImportError) and error.path and error.name in sys.stdlib_module_names:
        from meshrun.host.users_files import is_users_file

        if is_users_file(error.path):
            return UsageError(
                f"{error.path} is imported in place of Python's `{error.name}`",
                hint="rename it, or remove its folder from PYTHONPATH",
            )
    traceback.print_exception(error)
    return InternalError(
        f"this is a bug in meshrun: {error}",
        hint="please report it with the traceback above and the output of --report-bug",
    )
