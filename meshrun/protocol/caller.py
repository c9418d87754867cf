"""What a launcher and the program that started it, if it has one, tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshrun.host.folder import open_private

PARENT_PID = "MESHRUN_PARENT_PID"
"""Says to a launcher that it is the child of ``launch()`` or of an agent, and of which process."""
PARENT_FOLDER = "MESHRUN_PARENT_FOLDER"
"""A private folder of the parent's, where the launcher says why it cannot launch."""
MET = "met"
"""A file in that folder once the nodes have met, so that signals to the first concern all."""
WHY = "why"
"""A file in that folder with why the launcher is ended, before a signal that no user sent."""

_MARK = "\x1e"


@dataclass(frozen=True, slots=True)
class Caller:
    """The program that started this launcher and uses it: launch(), or a host's agent."""

    pid: int
    folder: str
    """Where it looks for news."""

    @property
    def why_ended(self) -> str:
        """Why this launcher was sent a signal by it, or by its end; "" if it was not."""
        if os.getppid() != self.pid:
            return "the process that started it has exited"
        try:
            with open(os.path.join(self.folder, WHY), opener=open_private) as file:
                return file.read()
        except OSError:
            return ""

    def note_met(self) -> None:
        """Tell it that the nodes have met."""
        open(os.path.join(self.folder, MET), "w", opener=open_private).close()


def end_of_call(number: int) -> bytes:
    """Return the line that a launcher prints once all is printed that ranks said in a call."""
    return f"{_MARK}{number}{_MARK}\n".encode()


def ended_call(line: str) -> int | None:
    """Return which call ended with that line, or ``None`` for any other line."""
    number = line.removeprefix(_MARK).removesuffix(_MARK)
    return int(number) if line == f"{_MARK}{number}{_MARK}" and number.isdecimal() else None
