"""``--check``: launch ranks that measure the mesh, and report what they found."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack

from meshrun.check.requirements import check_dims
from meshrun.cli.options import Options
from meshrun.errors import UsageError
from meshrun.host.folder import private_folder, read_private
from meshrun.host.own_variables import CHECK_FILE
from meshrun.host.processes import signals_blocked
from meshrun.host.stderr import note
from meshrun.plan.choices import STOP_SIGNALS, Format
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest

_PROGRAM = "meshrun.worker.check_ranks"
_MODES = ("quick", "full")
_FOUND_EXIT_CODE = 1


def read_check_program(options: Options) -> Program:
    """Return the program that ranks run in place of the user's.

    Raises:
        UsageError: If a program was given too, or there is no mesh to check.
    """
    words = options.line.program
    if words[1:] and words[0] in _MODES:
        raise UsageError(
            f"--check {words[0]} takes no arguments, found `{words[1]}`",
            hint=f"put options before `{words[0]}`",
        )
    if words and words[0] not in _MODES:
        raise UsageError(
            f"--check runs no program, found `{words[0]}`",
            hint="use --check quick or --check full, or run the program without --check",
        )
    if options.mesh is None:
        raise UsageError("--check requires --mesh", hint="for example: --check --mesh dp=2,tp=4")
    return Program(
        kind="module", target=_PROGRAM, args=(words[0] if words else "full", *options.check_path)
    )


def check_requirements(options: Options, request: LaunchRequest) -> None:
    """Check the options of ``--check`` and ``--check-first``.

    Raises:
        UsageError: If one is given without a check, or requires something of an unknown dim.
    """
    for other in (Options.check_first, Options.interactive, Options.watch):
        if options.check and options.is_typed(other):
            raise UsageError(f"{other.flag} cannot be used with --check, which runs no program")
    if not (options.check or options.check_first):
        for row in (Options.require, Options.check_path):
            if options.is_typed(row):
                raise UsageError(f"{row.flag} requires --check or --check-first")
        return
    if "" in options.check_path:
        raise UsageError("--check-path is empty")
    dims = request.mesh.mesh_dim_names if request.mesh is not None else None
    check_dims(options.require, dims or ())


def check_mesh(options: Options, request: LaunchRequest, launch: Callable[[], int]) -> int:
    """Launch the ranks that measure, print what they found, and return the exit code.

    If this process starts launchers on other hosts, that of node 0 prints the result.

    Raises:
        HostError: If the result cannot be written.
    """
    from meshrun.check.evaluate import CheckResult, evaluate, failed_hosts
    from meshrun.check.measured import Measured
    from meshrun.protocol.packing import unpack

    with ExitStack() as held:
        atexit.register(held.close)  # if a signal ends the launch, it ends this process too
        with signals_blocked(STOP_SIGNALS):  # until the folder is held
            path = os.path.join(held.enter_context(private_folder()), "measured")
        os.environ[CHECK_FILE] = path
        code = launch()
        if code or not os.path.exists(path):
            return code
        measured: Measured = unpack(read_private(path), Measured)
    from meshrun.report.check_result import render_check, render_check_json, render_check_svg
    from meshrun.report.plan_output import print_text

    result = evaluate(measured, options.require)
    if request.node_history is not None:
        from meshrun.report.node_history import record_failure

        for host, why in failed_hosts(result.findings).items():
            record_failure(request.node_history, host, "", f"--check found: {why}", note)
    render: dict[Format, Callable[[CheckResult], str]] = {
        "text": render_check, "json": render_check_json, "svg": render_check_svg,
    }  # fmt: skip
    text = render[options.format](result).rstrip("\n")
    print_text(f"{text}\n", options.output)
    if options.format == "svg" and options.output not in (None, "-"):  # also show the table
        print_text(f"{render_check(result)}\n", None)
    return _FOUND_EXIT_CODE if result.findings else 0
