"""How the launchers of a Slurm step communicate with the meshrun that runs srun.

That meshrun writes signals to srun's stdin, which srun copies to every task: srun itself would kill
the launchers on SIGTERM, and ``scancel`` needs an answer from Slurm's controller.

Launchers report their exit codes, because srun returns the worst of all tasks, and 0 for tasks that
it lost. They print lines on stderr, which the waiting meshrun removes from srun's output.
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
from meshrun.host.own_variables import STEP

if TYPE_CHECKING:
    from meshrun.host.reactor import Reactor

SILENT = "silent"
"""The word after the step's name if srun does not return the tasks' stderr."""
_MARK = "\x1e"
_BEGUN_LINE = re.compile(rf"{_MARK}[^{_MARK}\n]{{0,99}}(?:{_MARK}\r?)?\Z".encode())
"""An incomplete line of this kind at the end of a text."""
_READ_BYTES = 4096


class StepTask(Struct, frozen=True):
    """This launcher, as a task of such a step."""

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
