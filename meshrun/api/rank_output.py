"""What the ranks of a group print, passed on as it comes."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import suppress
from typing import TextIO

from meshrun.api.child_launcher import write_text
from meshrun.protocol.caller import ended_call

_OUTPUT_S = 2.0
"""How long to wait for what a call printed, if a rank does not say that it has ended."""


class RankOutput(io.TextIOBase):
    """Passes a stream of the ranks on, line by line, and knows whose call has said all."""

    def __init__(self, name: str, to: TextIO | None) -> None:
        self._name, self._to = name, to
        self._line = ""
        self._is_passed_on = True
        self.kept = ""
        """What was said since :meth:`keep`."""
        self._ended = -1
        """The last call of which all was said."""
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        """Take some of it."""
        *lines, self._line = (self._line + text).split("\n")
        shown = []
        for line in lines:
            if (number := ended_call(line)) is None:
                shown.append(f"{line}\n")
                continue
            with self._changed:
                self._ended = number
                self._changed.notify_all()
        self._pass_on("".join(shown))
        return len(text)

    def flush(self) -> None:
        """All is passed on at once."""

    def keep(self) -> None:
        """Pass nothing on any more, and keep it instead."""
        self._is_passed_on = False

    def wait_for(self, call: int) -> None:
        """Wait until all ranks have said what they say in a call."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= call, _OUTPUT_S)

    def close(self) -> None:
        """Pass on the beginning of a line that was never ended."""
        self._pass_on(self._line)
        self._line = ""

    def _pass_on(self, text: str) -> None:
        if not self._is_passed_on:
            self.kept += text
        elif (to := self._to or getattr(sys, self._name)) is not None:
            with suppress(Exception):  # it is closed, say: ranks do not wait for that
                write_text(to, text)
