"""Reports a rank's events to the launcher, one packet each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from meshrun.protocol import codec
from meshrun.protocol.zygote_messages import FromRank


class Reporter:
    """Reports a rank's progress to the launcher, until the launcher exits."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._socket = connection
        self._rank = rank
        self._pid = os.getpid()

    @property
    def is_in_fork(self) -> bool:
        """Whether this process is a fork of the rank, not the rank itself."""
        return os.getpid() != self._pid

    def for_fork(self) -> Reporter:
        """Return a reporter with which this fork of the rank may report in the rank's name."""
        return Reporter(self._socket, self._rank)

    def report(self, event: Callable[..., FromRank], /, **values: object) -> bool:
        """Report that ``event`` happened now; return whether the report was sent.

        A fork of the rank sends none. The report is lost if the launcher has exited, or if the
        program has closed all descriptors.
        """
        if self.is_in_fork:
            return False
        # As time.monotonic_ns(), which freezegun and time-machine replace.
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        happened = event(rank=self._rank, at_ns=now_ns, **values)
        try:
            self._socket.send(codec.encode(happened))
        except OSError:
            return False
        return True
