"""Passes on the output of a group's ranks."""

from __future__ import annotations

import io
import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

from meshrun.api.child_launcher import write_text
from meshrun.protocol.caller import ended_call

_OUTPUT_S = 2.0
"""How long to wait for the output of a call whose end is not marked."""


class RankOutput(io.TextIOBase):
    """Passes a stream of the ranks on, line by line, and notes where the output of a call ends."""

    def __init__(self, name: str, to: TextIO | None) -> None:
        self._name, self._to = name, to
        self._line = ""
        self._is_passed_on = True
        self.kept = ""
        """The output since :meth:`keep`."""
        self._complete = 0
        """The number of calls whose output is complete."""
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        """Take the next part of the stream."""
        *lines, self._line = (self._line + text).split("\n")
        shown = []
        for line in lines:
            if (number := ended_call(line)) is None:
                shown.append(f"{line}\n")
                continue
            with self._changed:
                self._complete = number + 1
                self._changed.notify_all()
        self._pass_on("".join(shown))
        return len(text)

    def keep(self) -> None:
        """Keep the output from now on instead of passing it on."""
        self._is_passed_on = False

    def wait_for(self, calls: int) -> None:
        """Wait for the output of all ranks during the first ``calls`` calls."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete >= calls, _OUTPUT_S)

    def wait_for_silence(self, seconds: float, *, most_s: float) -> str:
        """Return the kept output once nothing has followed it for a number of seconds."""
        until_s = time.monotonic() + most_s
        with self._changed:
            while time.monotonic() < until_s:
                if not self._changed.wait(seconds) and self.kept:
                    break
        return self.kept

    def close(self) -> None:
        """Pass on a last line that has not ended."""
        self._pass_on(self._line)
        self._line = ""

    def _pass_on(self, text: str) -> None:
        if not self._is_passed_on:
            with self._changed:
                self.kept += text
                self._changed.notify_all()
        elif (to := self._to or getattr(sys, self._name)) is not None:
            with suppress(Exception):  # ranks must not wait for a stream that is closed, say
                write_text(to, text)
