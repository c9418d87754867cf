"""Reports a rank's events to the launcher, one packet each."""

from __future__ import annotations

import os
import socket
import time

from meshrun.protocol import codec
from meshrun.protocol.events import (
    BreakpointPassed,
    FromRank,
    RankBeat,
    RankFinished,
    RankJoined,
    RankLeaves,
    RankReady,
)
from meshrun.protocol.rank_end import RankRaised


class Reporter:
    """Reports to the launcher what a rank has reached; silent once the launcher has exited."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._socket = connection
        self._rank = rank
        self._pid = os.getpid()

    @property
    def is_in_fork(self) -> bool:
        """Whether this process is a fork of the rank, and not the rank."""
        return os.getpid() != self._pid

    def joined(self) -> None:
        """The rank is in the process group."""
        self._send(RankJoined(rank=self._rank, at_ns=time.monotonic_ns()))

    def ready(self) -> None:
        """The program's first line is next."""
        self._send(RankReady(rank=self._rank, at_ns=time.monotonic_ns()))

    def raised(self, *, kind: str, message: str, text: str, shown: bool) -> None:
        """An exception left the program."""
        self._send(
            RankRaised(
                rank=self._rank,
                at_ns=time.monotonic_ns(),
                kind=kind,
                message=message,
                traceback=text,
                shown=shown,
            )
        )

    def beat(self, step: int | None) -> None:
        """The program makes progress, and has reached a step if it reports one."""
        self._send(RankBeat(rank=self._rank, at_ns=time.monotonic_ns(), step=step))

    def passed_breakpoint(self) -> None:
        """The program came to a breakpoint, and went on since there is no stdin to read."""
        self._send(BreakpointPassed(rank=self._rank))

    def finished(self) -> None:
        """The program went well, and the rank waits for its peers."""
        self._send(RankFinished(rank=self._rank, at_ns=time.monotonic_ns()))

    def leaves(self) -> None:
        """The program is over with another status than 0, and the rank ends."""
        self._send(RankLeaves(rank=self._rank, at_ns=time.monotonic_ns()))

    def _send(self, event: FromRank) -> None:
        if self.is_in_fork:
            return
        try:
            self._socket.send(codec.encode(event))
        except OSError:
            pass
