"""Reports a rank's events to the launcher, one packet each."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from meshrun.protocol import codec
from meshrun.protocol.from_zygote import FromRank


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

    def of_fork(self) -> Reporter:
        """Return what reports from this process, a fork of the rank, in the rank's name."""
        return Reporter(self._socket, self._rank)

    def tell(self, event: Callable[..., FromRank], /, **values: object) -> None:
        """Report that something has happened now, unless this is a fork of the rank."""
        self.has_told(event, **values)

    def has_told(self, event: Callable[..., FromRank], /, **values: object) -> bool:
        """As :meth:`tell`; return whether it was sent.

        It is not if the launcher has exited, or if the program has closed all descriptors.
        """
        if self.is_in_fork:
            return False
        happened = event(rank=self._rank, at_ns=time.monotonic_ns(), **values)
        try:
            self._socket.send(codec.encode(happened))
        except OSError:
            return False
        return True
