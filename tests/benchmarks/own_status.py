"""``own_status.py fork|exec PROGRAM ...``: launch 8 ranks and print how the failed ones ended.

A launcher's exit code covers only one rank and its report is text for people, so this calls the
functions below the command line, whose result names every rank.
"""

from __future__ import annotations

import json
import sys

from meshrun.app import launch, plan
from meshrun.console.console import Console
from meshrun.layout.spec import parse_mesh
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import signal_name


def main() -> None:
    """Launch the program on the command line and print a JSON list."""
    method, target, *arguments = sys.argv[1:]
    request = LaunchRequest(
        program=Program(kind="script", target=target, args=tuple(arguments)),
        start_method="exec" if method == "exec" else "fork",
        mesh=parse_mesh("2x4", "dp,tp"),
        device="cpu",
        preload=("torch", "torch.distributed.device_mesh"),
    )
    result = launch(plan(request), Console())
    if result.trouble is not None:
        raise result.trouble
    if result.broken_program is not None:
        raise SystemExit(result.broken_program)
    ends = [
        signal_name(failure.signum) if failure.signum else f"exit code {failure.exit_code}"
        for failure in result.failures
    ]
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
