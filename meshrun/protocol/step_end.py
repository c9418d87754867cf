"""What the launchers of a step of Slurm tell the meshrun that waits for srun.

srun itself returns the worst code of all tasks, and 0 for those that it lost. A launcher says more,
in a line on stderr that srun carries wherever it carries output, and that nobody else is to see.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

STEP = "MESHRUN_STEP"
"""Names the step to its launchers, if somebody waits for such lines."""
_MARK = "\x1e"
_BEGUN = re.compile(rf"{_MARK}[^{_MARK}\n]{{0,99}}(?:{_MARK}\r?)?\Z".encode())
"""The beginning of such a line, at the end of a text."""


def report_end(step: str, code: int, *, is_first: bool, is_over: bool) -> None:
    """In a launcher: say how it ends.

    Args:
        step: The name of the step.
        code: Its exit code, or what that would be outside of the step.
        is_first: Whether it is that of the first node, which decides for all.
        is_over: Whether the launch has ended, and not only what this node has of it.
    """
    line = f"{_MARK}{step} {int(is_first)}{int(is_over)} {code}{_MARK}\n"
    with suppress(OSError):
        os.write(2, line.encode())


class StepEnds:
    """Takes these lines out of what srun prints."""

    def __init__(self, step: str) -> None:
        mark = re.escape(_MARK)
        # With a label of srun's before it.
        line = rf"(?: *\d+: )?{mark}{re.escape(step)} ([01])([01]) (\d+){mark}\r?\n"
        self._line = re.compile(line.encode())
        self._kept = b""
        self._first: int | None = None
        self._others: list[int] = []
        self.is_over = False
        """Whether a launcher has said that the launch has ended."""

    def take(self, data: bytes) -> bytes:
        """Return what is for people; b"" is the end of it."""
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
        """Return the exit code of the launch; ``None`` if srun's 0 is all that is known of it."""
        if self._first is not None:
            return self._first
        return max((of_srun, *self._others)) or (0 if self._others else None)
