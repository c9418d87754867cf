"""Sockets that are bound before anything starts, and the pairs that processes talk over."""

from __future__ import annotations

import socket
import sys

LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

_PACKETS = socket.SOCK_DGRAM if sys.platform == "darwin" else socket.SOCK_SEQPACKET


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1 and nowhere else.

    The port stays ours from here on: connections made before anybody serves wait in the queue.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK_ADDRESS, 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of each packet."""
    return socket.socketpair(socket.AF_UNIX, _PACKETS)
