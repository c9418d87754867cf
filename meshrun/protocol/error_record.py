"""torch-elastic's error files, which ``@record`` writes when a program raises.

Source:
    ``ErrorHandler`` in torch 2.13's ``distributed/elastic/multiprocessing/errors``.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from meshrun.errors import MeshrunError
from meshrun.host import rank_variables as var
from meshrun.host.folder import Opener, nonblocking
from meshrun.host.named_files import write_whole
from meshrun.host.own_variables import WORKER_PID
from meshrun.host.printable import one_line
from meshrun.protocol.codec import shorten
from meshrun.protocol.packing import read_json
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.result import LaunchResult, cause_of

_MOST_BYTES = 4 * 1024 * 1024


def read_record(path: str, rank: int, opener: Opener) -> RankRaised | None:
    """Return the exception in an error file, or ``None`` if it cannot be read."""
    try:
        with open(path, "rb", opener=nonblocking(opener)) as file:
            message = read_json(file.read(_MOST_BYTES))["message"]
        if isinstance(message, str):
            headline, trace = message, message
        else:
            headline = str(message["message"])
            trace = str(message.get("extraInfo", {}).get("py_callstack") or headline)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    kind, _, text = headline.partition(": ")
    return RankRaised(
        rank=rank,
        at_ns=time.monotonic_ns(),
        kind=one_line(kind),
        message=shorten(text),
        traceback=shorten(trace),
        shown=True,  # @record re-raises, so Python has printed it
    )


def write_record(path: str, raised: RankRaised, exit_code: int, opener: Opener) -> None:
    """Write an exception as ``@record`` does, unless it has, or the file cannot be written.

    For a launch below the program that failed, it has written the error of the rank there.
    """
    there = read_record(path, raised.rank, opener)
    if there is not None and (
        raised.kind == "ChildFailedError"
        or (there.kind, there.message) == (raised.kind, raised.message)
    ):
        return
    with suppress(OSError), open(path, "w", encoding="utf-8", opener=nonblocking(opener)) as file:
        file.write(render_record(raised, exit_code))


def render_record(raised: RankRaised, exit_code: int) -> str:
    """Return what ``@record`` writes for an exception."""
    record = {
        "message": {
            "message": f"{raised.kind}: {raised.message}",
            "extraInfo": {"py_callstack": raised.traceback, "timestamp": str(int(time.time()))},
            "errorCode": exit_code,
        }
    }
    return json.dumps(record)


def forward_error(result: LaunchResult) -> None:
    """Write the cause for a parent that runs meshrun as torch-elastic runs a worker.

    A rank that started this launcher as a child may handle the failure, so nothing is written then.
    """
    path = os.environ.get(var.ERROR_FILE)
    is_worker = os.environ.get(WORKER_PID, str(os.getpid())) == str(os.getpid())
    cause = cause_of(result)
    if path and is_worker and cause is not None and cause.raised is not None:
        record = render_record(cause.raised, result.exit_code)
        with suppress(MeshrunError):
            write_whole(path, record, var.ERROR_FILE, is_private=True)
