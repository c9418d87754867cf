"""``own_status.py fork|exec PROGRAM ...``: launch 8 ranks and print how the failed ones ended.

A launcher's exit code covers only one rank, but the result of ``launch()`` names every rank.
"""

from __future__ import annotations

import json
import sys

import meshrun
from meshrun.protocol.result import signal_name


def main() -> None:
    """Launch the program on the command line and print a JSON list."""
    method, target, *arguments = sys.argv[1:]
    result = meshrun.launch(
        target, args=arguments, start_method=method, mesh="2x4", names="dp,tp", device="cpu"
    )
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
