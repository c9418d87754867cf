"""``--interactive``: a prompt whose input runs on every rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from meshrun.cli.end import returncode
from meshrun.cli.option import Option
from meshrun.cli.options import Options
from meshrun.cli.read import check_one_node
from meshrun.errors import UsageError
from meshrun.host.processes import set_title
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.caller import Invocation

_INCOMPATIBLE: Mapping[Option[Any], str] = {
    Options.status: ": both need the terminal",
    Options.debug_rank: ": both need the terminal",
    Options.max_restarts: ": ranks wait for input",
    Options.hang_timeout: ": ranks wait for input",
    Options.report: "",
    Options.watch: "",
}
"""Options that cannot be used with a prompt, and why."""


def interact(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Start the ranks and the prompt; return the exit code.

    Raises:
        UsageError: If another option makes no sense with a prompt.
    """
    _check(options, request, invocation)
    set_title("prompt", *sys.argv[1:])
    from meshrun.api.prompt import run_prompt

    line = options.line
    words = replace(line, program=()).words(without={Options.interactive.flag})
    program = () if line.program[:1] in ((), ("-",)) else line.program
    return returncode(options.exit_code, run_prompt(words, program), of_rank=True)


def _check(options: Options, request: LaunchRequest, invocation: Invocation) -> None:
    flag = Options.interactive.flag
    if invocation.caller is not None:
        raise UsageError(f"{flag} cannot be used with launch()", hint="use meshrun.WorkerGroup")
    check_one_node(request, Options.interactive)
    if request.program.kind == "command":
        raise UsageError(f"{flag} requires a Python program, found `{request.program.target}`")
    for row, why in _INCOMPATIBLE.items():
        if options.is_typed(row):
            raise UsageError(f"{flag} cannot be used with {row.flag}{why}")
