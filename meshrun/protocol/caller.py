"""Communication between a launcher and the program that started it."""

from __future__ import annotations

import contextlib
import os
import re

from msgspec import Struct

from meshrun.host.folder import open_private, read_private
from meshrun.host.own_variables import PARENT_FOLDER, PARENT_PID
from meshrun.protocol.step_task import StepTask

ERROR = "error.json"
"""A file in the caller's folder, which a launcher that cannot launch writes: its error."""
REPORT = "report.json"
"""The report of a launcher that was told to write it there."""
JOINED = "joined"
"""A file in that folder once all nodes have joined: node 0 then passes signals on to the others."""
WHY = "why"
"""A file in that folder with the reason for the parent's next signal to the launcher."""

_MARK = "\x1e"
_END_OF_CALL = re.compile(f"{_MARK}([0-9]{{1,18}}){_MARK}")


class Caller(Struct, frozen=True):
    """The program that started this launcher: ``launch()``, or the agent of a host."""

    pid: int
    folder: str
    """The value of ``MESHRUN_PARENT_FOLDER``."""

    @property
    def why_ended(self) -> str:
        """The reason for a signal from the caller, or caused by its exit; "" if there is none."""
        if os.getppid() != self.pid:
            return "the process that started it has exited"
        try:
            return read_private(os.path.join(self.folder, WHY)).decode()
        except OSError:
            return ""

    def report_joined(self) -> None:
        """Report that all nodes have joined, so that signals come only through node 0.

        On a full disk this is omitted: they then also come directly.
        """
        with contextlib.suppress(OSError):
            open(os.path.join(self.folder, JOINED), "wb", opener=open_private).close()


class Invocation(Struct, frozen=True):
    """How this process was started, from the command line or by a caller."""

    began_ns: int
    """Monotonic time at which the user's wait began."""
    hosts_present: tuple[str, ...] = ()
    """The hosts at the start of the ``--hosts`` launch that started this process, if one did."""
    is_quiet: bool = False
    """Whether another host of that launch prints what concerns all of them."""
    caller: Caller | None = None
    """The program that started this process and waits for it, if any."""
    task: StepTask | None = None
    """This process as a task of a Slurm step, if a meshrun process waits for its end."""


def as_caller(folder: str) -> dict[str, str]:
    """Return the variables that make this process the caller of a launcher."""
    return {PARENT_PID: str(os.getpid()), PARENT_FOLDER: folder}


def end_of_call(number: int) -> bytes:
    """Return the line that a launcher prints after all output of the ranks in a call."""
    return f"{_MARK}{number}{_MARK}\n".encode()


def ended_call(line: str) -> int | None:
    """Return the number of the call that a line ends, or ``None`` for any other line."""
    match = _END_OF_CALL.fullmatch(line)
    return int(match[1]) if match else None
