"""The zygote's end of its connection to the launcher."""

from __future__ import annotations

import signal
import socket
from typing import Any

from meshrun.host.sockets import peer_of
from meshrun.protocol import codec
from meshrun.protocol.from_zygote import FromZygote, NegotiationFailed, RankReady

_FDS_PER_PACKET = 4
LEFT_TO_LAUNCHER = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),  # warnings, which --forward is for
)


def send(control: socket.socket, event: FromZygote | RankReady | NegotiationFailed) -> None:
    """Send to the launcher; if it is dead, the loop notices at its end of the socket."""
    try:
        control.send(codec.encode(event))
    except (BrokenPipeError, ConnectionError):
        pass


def maker_of(control: socket.socket) -> int:
    """Return the process that made the connection, the launcher; 0 where the system cannot tell.

    By the time this process asks for its parent's id, init may be its parent.
    """
    peer = peer_of(control)
    return 0 if peer is None else peer[0]


def receive(control: socket.socket, fds: list[int] | None = None) -> codec.Message | None:
    """Return the next order, or ``None`` once the launcher is dead."""
    try:
        packet, received, _, _ = socket.recv_fds(control, codec.PACKET_BYTES, _FDS_PER_PACKET)
    except ConnectionError:
        return None
    if fds is not None:
        fds.extend(received)
    return codec.decode(packet) if packet else None


def leave_signals_to_launcher() -> dict[int, Any]:
    """Outlive signals sent to the whole job; return the dispositions that ranks get back.

    Schedulers and terminals signal every process, and the launcher decides what follows. A
    handler that does nothing, unlike SIG_IGN, is not passed on to what a rank executes.
    """
    before: dict[int, Any] = {}
    for signum in LEFT_TO_LAUNCHER:
        before[signum] = signal.getsignal(signum)
        if before[signum] != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, lambda *_: None)
    return before
