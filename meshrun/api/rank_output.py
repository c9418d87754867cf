"""What the ranks of a group print, passed on as it comes."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections import Counter
from contextlib import suppress
from typing import TextIO

from meshrun.api.child_launcher import write_text
from meshrun.worker.call_channel import end_of_output

_OUTPUT_S = 2.0
_END = end_of_output(0)[0]
_PREFIX = re.compile(r"(?:\[[^\]\n]*\] )?")


class RankOutput(io.TextIOBase):
    """Passes a stream of the ranks on, line by line, and knows whose call has said all."""

    def __init__(self, name: str, to: TextIO | None) -> None:
        self._name, self._to = name, to
        self._line = ""
        self._is_passed_on = True
        self.kept = ""
        """What was said since :meth:`keep`."""
        self._ends: Counter[str] = Counter()
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        """Take some of it."""
        *lines, self._line = (self._line + text).split("\n")
        shown = []
        for line in lines:
            said, mark, rest = line.partition(_END)
            if not mark:
                shown.append(f"{line}\n")
                continue
            if not _PREFIX.fullmatch(said):
                shown.append(f"{said}\n")
            with self._changed:
                self._ends[rest.partition(_END)[0]] += 1
                self._changed.notify_all()
        self._pass_on("".join(shown))
        return len(text)

    def flush(self) -> None:
        """All is passed on at once."""

    def keep(self) -> None:
        """Pass nothing on any more, and keep it instead."""
        self._is_passed_on = False

    def wait_for(self, call: int, ranks: int) -> None:
        """Wait until all ranks have said what they say in a call; who closes a stream says none."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends[str(call)] >= ranks, _OUTPUT_S)
            self._ends.clear()  # calls are made one after the other

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
