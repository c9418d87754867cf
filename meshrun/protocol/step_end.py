"""How the launchers of a Slurm step report their exit codes to the meshrun that runs srun.

srun itself returns the worst exit code of all tasks, and 0 for tasks that it lost. So each launcher
prints a line on stderr, which srun forwards and the waiting meshrun removes from the output.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

STEP = "MESHRUN_STEP"
"""The name of the step, set for its launchers if a meshrun waits for these lines."""
_MARK = "\x1e"
_BEGUN = re.compile(rf"{_MARK}[^{_MARK}\n]{{0,99}}(?:{_MARK}\r?)?\Z".encode())
"""An incomplete line of this kind at the end of a text."""


def report_end(step: str, code: int, *, is_first: bool, is_over: bool) -> None:
    """Report this launcher's exit code.

    Args:
        step: The name of the step.
        code: The exit code, as it would be outside of the step.
        is_first: Whether this is node 0, which decides for all.
        is_over: Whether the launch has ended, rather than only this node's part.
    """
    line = f"{_MARK}{step} {int(is_first)}{int(is_over)} {code}{_MARK}\n"
    with suppress(OSError):
        os.write(2, line.encode())


class StepEnds:
    """Removes these lines from srun's output, and collects their exit codes."""

    def __init__(self, step: str) -> None:
        mark = re.escape(_MARK)
        # srun may put a label before it.
        line = rf"(?: *\d+: )?{mark}{re.escape(step)} ([01])([01]) (\d+){mark}\r?\n"
        self._line = re.compile(line.encode())
        self._kept = b""
        self._first: int | None = None
        self._others: list[int] = []
        self.is_over = False
        """Whether a launcher has reported the end of the launch."""

    def feed(self, data: bytes) -> bytes:
        """Return the output without these lines; ``data`` is ``b""`` at its end."""
        text = self._line.sub(self._note, self._kept + data)
        begun = _BEGUN.search(text) if data else None
        shown = len(text) if begun is None else begun.start()
        self._kept = text[shown:]
        return text[:shown]

    def _note(self, found: re.Match[bytes]) -> bytes:
        code = int(found[3])
        if found[1] == b"1":
            self._first = code
        else:
            self._others.append(code)
        self.is_over = self.is_over or found[2] == b"1"
        return b""

    def code(self, of_srun: int) -> int | None:
        """Return the exit code of the launch; ``None`` if only srun's 0 is known."""
        if self._first is not None:
            return self._first
        return max((of_srun, *self._others)) or (0 if self._others else None)
