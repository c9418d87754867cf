"""``python -m meshrun`` and the ``meshrun`` command."""

from __future__ import annotations

import os
import signal
import time

_BEGAN_NS = time.monotonic_ns()


def main(_known_at_start: object = None) -> None:
    """Run the command line and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until there is something to end, a Ctrl-C ends us without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from meshrun.cli import run_command_line
    from meshrun.running import Began

    conducted, _, told = os.environ.pop("MESHRUN_CONDUCTED", "").partition(" ")
    began = Began(
        _BEGAN_NS,
        conducted=int(conducted or 0),
        is_told=bool(told),
        folder=os.environ.get("MESHRUN_PARENT_FOLDER", ""),
    )
    if "MESHRUN_PARENT_PID" in os.environ:
        from meshrun.launching import serve_caller

        run_command_line(began, tell=serve_caller())
    run_command_line(began)


if __name__ == "__main__":
    main()
