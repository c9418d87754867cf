"""Communication between a launcher and what started it: a program, an agent, or a Slurm step.

A meshrun that runs srun writes signals to srun's stdin, which srun copies to every task: srun
itself would kill the launchers on SIGTERM, and ``scancel`` needs an answer from Slurm's controller.

The launchers of a step report their exit codes, because srun returns the worst of all tasks, and 0
for tasks that it lost. They print lines on stderr, which the waiting meshrun removes from srun's
output.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from meshrun.host.descriptors import empty_stdin
from meshrun.host.folder import open_private, read_private
from meshrun.host.own_variables import PARENT_FOLDER, PARENT_PID, STEP

if TYPE_CHECKING:
    from meshrun.host.reactor import Reactor

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
SILENT = "silent"
"""The word after the step's name if srun does not return the tasks' stderr."""
_BEGUN_LINE = re.compile(rf"{_MARK}[^{_MARK}\n]{{0,99}}(?:{_MARK}\r?)?\Z".encode())
"""An incomplete line of this kind at the end of a text."""
_READ_BYTES = 4096


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
        with suppress(OSError):
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


class StepTask(Struct, frozen=True):
    """This launcher, as a task of a step of Slurm that meshrun has started."""

    step: str
    """The name of the step; "" if this process cannot report."""
    is_first: bool
    """Whether this is node 0, which decides for all."""
    orders: int
    """The descriptor from which to read signals, a byte for each."""

    def raise_signals(self, reactor: Reactor) -> None:
        """Raise here the signals that have arrived, and those that will."""
        reactor.add_reader(self.orders, lambda: self._raise_signals(reactor))

    def report_end(self, code: int, *, is_over: bool) -> None:
        """Report this launcher's exit code, as it would be outside of the step.

        Args:
            code: The exit code.
            is_over: Whether the launch has ended, rather than only this node's part.
        """
        self.report(f"{int(self.is_first)}{int(is_over)} {code}")

    def report(self, text: str) -> None:
        """Print a line for the process that waits."""
        if not self.step:
            return
        with suppress(OSError):
            os.write(2, f"{_MARK}{self.step} {text}{_MARK}\n".encode())

    def _raise_signals(self, reactor: Reactor) -> None:
        signums = os.read(self.orders, _READ_BYTES)
        if not signums:
            reactor.remove(self.orders)
        for signum in signums:
            signal.raise_signal(signum)


def join_step() -> StepTask | None:
    """Return this process's task, and take its stdin away from ranks; ``None`` elsewhere."""
    if not (found := os.environ.pop(STEP, "")):
        return None
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):  # the variable is left over
        return None
    step, _, silent = found.partition(" ")
    orders = os.dup(0)
    empty_stdin()
    task = StepTask("" if silent else step, os.environ.get("SLURM_PROCID") == "0", orders)
    task.report(f"begun {os.environ.get('SLURM_STEP_ID', '')}")
    return task


class StepReports:
    """Removes the launchers' lines from srun's output, and collects what they report."""

    def __init__(self, step: str) -> None:
        mark = re.escape(_MARK)
        # srun may put a label before it.
        line = rf"(?: *\d+: )?{mark}{re.escape(step)} (?:begun (\d*)|([01])([01]) (\d+)){mark}\r?\n"
        self._line = re.compile(line.encode())
        self._kept = b""
        self.step_id: str | None = None
        """Slurm's number of the step, once a launcher has begun."""
        self._first: int | None = None
        self._others: list[int] = []
        self.is_over = False
        """Whether a launcher has reported the end of the launch."""

    def feed(self, data: bytes) -> bytes:
        """Return the output without these lines; ``data`` is ``b""`` at its end."""
        text = self._line.sub(self._note, self._kept + data)
        begun = _BEGUN_LINE.search(text) if data else None
        shown = len(text) if begun is None else begun.start()
        self._kept = text[shown:]
        return text[:shown]

    def _note(self, found: re.Match[bytes]) -> bytes:
        step_id, is_first, is_over, code = found.groups()
        if code is None:
            self.step_id = step_id.decode()
        elif is_first == b"1":
            self._first = int(code)
        else:
            self._others.append(int(code))
        self.is_over = self.is_over or is_over == b"1"
        return b""

    def code(self, of_srun: int) -> int | None:
        """Return the exit code of the launch; ``None`` if only srun's 0 is known."""
        if self._first is not None:
            return self._first
        return max((of_srun, *self._others)) or (0 if self._others else None)
