"""``--interactive``: a prompt whose input runs on every rank."""

from __future__ import annotations

import sys
from dataclasses import replace

from meshrun.cli.began import Began
from meshrun.cli.options import Options
from meshrun.cli.words import CommandLine
from meshrun.errors import UsageError
from meshrun.host.title import set_title
from meshrun.plan.request import LaunchRequest

_NEED_TERMINAL = (Options.status.flag, Options.debug_rank.flag)
_WAITS = (Options.max_restarts.flag, Options.hang_timeout.flag)
_OWN = {Options.interactive.flag, Options.standalone.flag}


def interact(options: Options, request: LaunchRequest, line: CommandLine, began: Began) -> int:
    """Start the ranks and the prompt; return the exit code.

    Raises:
        UsageError: If another option makes no sense with a prompt.
    """
    _check(options, request, began)
    set_title("prompt", *sys.argv[1:])
    from meshrun.api.prompt import run_prompt

    words = replace(line, program=()).words(without=_OWN)
    program = () if line.program[:1] in ((), ("-",)) else line.program
    return run_prompt([*words, Options.standalone.flag], program)


def _check(options: Options, request: LaunchRequest, began: Began) -> None:
    flag = Options.interactive.flag
    if began.caller is not None:
        raise UsageError(f"{flag} cannot be used with launch()", hint="use meshrun.WorkerGroup")
    if request.remote is not None or (request.nnodes or 1) > 1:
        nodes = len(request.remote.hosts) if request.remote is not None else request.nnodes
        raise UsageError(
            f"{flag} runs all ranks on this machine, found {nodes} nodes",
            hint="remove --hosts, --hostfile or --nnodes",
        )
    if request.program.kind == "command":
        raise UsageError(f"{flag} requires a Python program, found `{request.program.target}`")
    typed = {row.flag for row in options.rows() if options.is_typed(row)}
    for name in _NEED_TERMINAL:
        if name in typed:
            raise UsageError(f"{flag} cannot be used with {name}: both need the terminal")
    for name in _WAITS:
        if name in typed:
            raise UsageError(f"{flag} cannot be used with {name}: ranks wait for input")
    for name in (Options.report.flag, Options.watch.flag):
        if name in typed:
            raise UsageError(f"{flag} cannot be used with {name}")
