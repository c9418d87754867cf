"""Listening sockets, bound before anything starts, and socket pairs between processes."""

from __future__ import annotations

import errno
import socket
import struct
import sys

from meshrun.errors import HostError, UsageError
from meshrun.host.shortage import describe_shortage

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

_PACKETS = socket.SOCK_DGRAM if sys.platform == "darwin" else socket.SOCK_SEQPACKET


def listen_on(address: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens on one address of this machine only.

    The port (a free one for 0) stays ours: clients that connect before it is served are queued. If
    it is shared, another socket of this user's may listen there too.

    Raises:
        UsageError: If the address is not one of this machine's, or does not resolve.
        HostError: If the port is in use.
    """
    try:
        # As bytes if possible: for a str, Python loads the tables of international names.
        name = address.encode() if address.isascii() else address
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"`{address}` does not resolve to an address: {error.strerror}",
            hint="on one node, remove the address: ranks meet on loopback",
        ) from error
    # A name may have addresses of both families; programs more often connect to 127.0.0.1 than ::1.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, kind, _, _, place = found[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise HostError(
                f"port {port} on {address} is in use",
                hint="remove --master-port, or the port of --rdzv-endpoint, to use a free one",
            ) from error
        what = f"cannot listen on `{address}` port {port}: {error.strerror}"
        if (shortage := describe_shortage(error)) is not None:
            raise HostError(what, hint=shortage.hint) from error
        raise UsageError(
            what, hint="on one node, remove the address: ranks meet on loopback"
        ) from error
    try:
        _check_route_to(listener)
    except HostError:
        listener.close()
        raise
    return listener


def _check_route_to(listener: socket.socket) -> None:
    """Check that this machine can connect to its own address, without sending anything."""
    place = listener.getsockname()
    with socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)
        except OSError as error:
            raise HostError(
                f"this machine cannot connect to its own address `{place[0]}`: {error.strerror}",
                hint=f"check that the loopback interface is up: `ip link set {LOOPBACK_INTERFACE}"
                " up`",
            ) from error


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that preserve message boundaries."""
    return socket.socketpair(socket.AF_UNIX, _PACKETS)


def peer_of(connection: socket.socket) -> tuple[int, int] | None:
    """Return (pid, uid) of the peer of a local connection, or of the creator of a socket pair.

    ``None`` if the system does not support this (macOS).

    Source:
        unix(7): SO_PEERCRED is a struct of pid, uid and gid.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid
