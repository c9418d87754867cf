"""The zygote's end of its connection to the launcher, and what both do with signals and orphans."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from typing import Any

from meshrun.host.network import peer_of
from meshrun.host.own_variables import LAUNCH_MARK
from meshrun.host.process_state import marked_processes
from meshrun.host.processes import become_subreaper, frees_memory, send_signal
from meshrun.host.reactor import Steps
from meshrun.protocol import codec
from meshrun.protocol.zygote_messages import FromZygote, NegotiationFailed, RankReady

_FDS_PER_PACKET = 4
LEFT_TO_LAUNCHER = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,  # a scheduler's warnings; see --forward
)  # fmt: skip
_SWEEP_TAKES_S = 10.0
_BETWEEN_SCANS_S = 0.02
_CLEAN_SCANS = 12
"""A process in ``execve`` shows no environment for a moment, longer on a busy machine."""


def send(control: socket.socket, event: FromZygote | RankReady | NegotiationFailed) -> None:
    """Send an event to the launcher; if it is dead, the loop will see the socket close."""
    try:
        control.send(codec.encode(event))
    except ConnectionError:
        pass


def launcher_pid(control: socket.socket) -> int:
    """Return the process that created the socket pair; 0 where the system cannot tell.

    ``os.getppid()`` would name init if the launcher has died already.
    """
    peer = peer_of(control)
    return 0 if peer is None else peer[0]


def receive(control: socket.socket) -> tuple[codec.Message | None, list[int]]:
    """Return the next order, ``None`` once the launcher is dead, and its descriptors.

    Raises:
        OSError: If this process may have no more descriptors.
    """
    try:
        packet, fds, flags, _ = socket.recv_fds(control, codec.PACKET_BYTES, _FDS_PER_PACKET)
    except ConnectionError:
        return None, []
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return (codec.decode(packet) if packet else None), fds


def is_hung_up(control: socket.socket) -> bool:
    """Return whether the launcher is dead, even if orders of it are still to be read."""
    poll = select.poll()
    poll.register(control, 0)
    return bool(poll.poll(0))


def leave_signals_to_launcher() -> dict[int, Any]:
    """Survive signals sent to the whole job; return the previous dispositions, for the ranks.

    Schedulers and terminals signal every process, but the launcher alone decides what follows. A
    handler that does nothing, unlike SIG_IGN, is reset when a rank executes a program.
    """
    before: dict[int, Any] = {}
    for signum in LEFT_TO_LAUNCHER:
        before[signum] = signal.getsignal(signum)
        if before[signum] != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, lambda *_: None)
    # The launcher has blocked them, and others before it may have blocked SIGCHLD.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*LEFT_TO_LAUNCHER, signal.SIGCHLD))
    return before


def killing_orphans(mark: str) -> Steps[None]:
    """Kill all processes with a launch's mark where none adopts orphans (gVisor, macOS)."""
    if mark and not become_subreaper():
        yield from killing_marked(mark)


def killing_marked(mark: str) -> Steps[None]:
    """Kill all processes with a launch's mark, until several scans in a row find none."""
    deadline = time.monotonic() + _SWEEP_TAKES_S
    clean = 0
    while clean < _CLEAN_SCANS and time.monotonic() < deadline:
        marked = marked_processes(f"{LAUNCH_MARK}={mark}")
        found = [pid for pid in marked if not frees_memory(pid)]
        clean = 0 if found else clean + 1
        for pid in found:
            send_signal(pid, signal.SIGKILL)
        yield _BETWEEN_SCANS_S
