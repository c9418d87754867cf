"""Sockets that listen, bound before anything starts, or connect without blocking."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address

from meshrun.errors import HostError, UsageError
from meshrun.host.forked_call import ForkedCall
from meshrun.host.interfaces import look_up, sockaddr_of
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import describe_shortage

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_PACKETS = socket.SOCK_DGRAM if sys.platform == "darwin" else socket.SOCK_SEQPACKET
_ADDRESS_HINT = "on one node, remove the address: ranks meet on loopback"
_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD, _LOAD_BYTE, _AND, _IF_EQUAL, _GO, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000
_SINK, _LISTENER = 0, 1
"""The sockets by number, in the order in which they began to listen."""
_Step = tuple[int, int, int, int]
"""Code, steps to skip if true, steps to skip if false, and a number."""
_GLIBC_DEFAULT = "dns [!UNAVAIL=return] files"


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
            f"`{address}` does not resolve to an address: {error.strerror}", hint=_ADDRESS_HINT
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
        raise UsageError(what, hint=_ADDRESS_HINT) from error
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


class Lookup:
    """A lookup of a name in a process of its own, as a resolver may take many seconds.

    Args:
        answered: Called with the addresses and, if there are none, the reason.
    """

    def __init__(
        self, host: str, reactor: Reactor, answered: Callable[[list[str], str], object]
    ) -> None:
        self._reactor, self._call = reactor, ForkedCall(partial(_look_up, host))
        no_answer: tuple[list[str], str] = [], "the lookup was stopped"
        self._call.follow(reactor, lambda found: answered(*(found or no_answer)))

    def close(self) -> None:
        """Stop the lookup if it is still running."""
        self._reactor.drop(self._call)


def _look_up(host: str) -> tuple[list[str], str]:
    try:
        return look_up(host), ""
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)


class Connecting:
    """An attempt to connect to an address.

    Args:
        most_s: How long to wait for it.
        ended: Called later with the connected socket, or with ``None`` and why; "" for no answer.
    """

    def __init__(
        self,
        address: str,
        port: int,
        reactor: Reactor,
        *,
        most_s: float,
        ended: Callable[[socket.socket | None, str], object],
    ) -> None:
        self._reactor, self._ended, why = reactor, ended, ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(sockaddr_of(address, port))
        except BlockingIOError:
            pass
        except OSError as error:
            why, most_s = error.strerror or str(error), 0.0
        if not why:
            reactor.add_writer(self._socket, self._finish)
        self._limit = reactor.call_at(None, partial(self._fail, why), skips=False)
        self._limit.restart(most_s)

    def _finish(self) -> None:
        assert self._socket is not None  # noqa: S101 - otherwise, no writer is registered
        if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(os.strerror(code))
            return
        connected, self._socket = self._socket, None
        self._reactor.remove(connected)
        self._limit.cancel()
        self._ended(connected, "")

    def _fail(self, why: str) -> None:
        self.close()
        self._ended(None, why)

    def close(self) -> None:
        """End the attempt, unless it has ended."""
        self._limit.cancel()
        self._reactor.drop(self._socket)
        self._socket = None


def listen_for(addresses: Iterable[str], on: str) -> tuple[socket.socket, socket.socket]:
    """Return a socket that listens on a free port for ``addresses``, and one that gets all others.

    This is for sockets that other code serves without authentication, such as torch's store: the
    kernel keeps connections of unknown machines from it. Nobody serves the second one, which must
    stay open as long as the first. Both listen ``on`` an address of this machine.

    Where two sockets listen on one port, a classic BPF program selects one for each connection,
    before it is established (``SO_ATTACH_REUSEPORT_CBPF`` in socket(7)). No privilege is needed.

    Raises:
        OSError: If the system cannot do this, or there are too many addresses.
        HostError: As :func:`~meshrun.host.sockets.listen_on`, and UsageError likewise.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "requires Linux")
    steps = _build_program(addresses)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    sink = listen_on(on, 0, is_shared=True)
    try:
        # Before the other one listens, so that it never gets a connection of an outsider.
        program = struct.pack("@HP", len(steps), ctypes.addressof(code))
        sink.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
        return listen_on(on, sink.getsockname()[1], is_shared=True), sink
    except BaseException:
        sink.close()
        raise


def _build_program(addresses: Iterable[str]) -> list[_Step]:
    """Return the steps that select the listener for a packet from one of ``addresses``."""
    v4, v6 = set[IPv4Address](), set[IPv6Address]()
    for text in addresses:
        address = ip_address(text.partition("%")[0])
        if isinstance(address, IPv4Address):
            v4.add(address)
        elif address.ipv4_mapped is not None:
            v4.add(address.ipv4_mapped)
        else:
            v6.add(address)
    steps_v4: list[_Step] = [(_LOAD, 0, 0, _NETWORK_HEADER + 12)]
    for known in sorted(v4):
        steps_v4 += [(_IF_EQUAL, 0, 1, int(known)), (_RETURN, 0, 0, _LISTENER)]
    steps_v6: list[_Step] = []
    for other in sorted(v6):
        words = struct.unpack(">4I", other.packed)
        for number, word in enumerate(words):
            to_next = 2 * (len(words) - number) - 1
            steps_v6 += [(_LOAD, 0, 0, _NETWORK_HEADER + 8 + 4 * number)]
            steps_v6 += [(_IF_EQUAL, 0, to_next, word)]
        steps_v6.append((_RETURN, 0, 0, _LISTENER))
    refuse: _Step = (_RETURN, 0, 0, _SINK)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_IF_EQUAL, 1, 0, 0x40),
        (_GO, 0, 0, len(steps_v4) + 1),
        *steps_v4,
        refuse,
        *steps_v6,
        refuse,
    ]


@contextmanager
def names_from_files_only() -> Iterator[None]:
    """Look up host names only in the hosts file during the block; with glibc only.

    torch's store looks up the *names* of peers. The hosts file has none for ``::ffff:127.0.0.1``,
    so the query goes to DNS; in a burst of them, one may be lost and time out after five seconds.
    meshrun passes only addresses, so a rank needs no names to connect.

    Source:
        ``__nss_configure_lookup`` of glibc's ``<nss.h>``: it replaces the service list of one
        database for this process.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is None:
        yield
        return
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", _configured_services().encode())


def _configured_services() -> str:
    """Return the services that ``/etc/nsswitch.conf`` lists for host names."""
    try:
        with open("/etc/nsswitch.conf", encoding="utf-8") as file:
            for line in file:
                database, colon, services = line.partition("#")[0].partition(":")
                if colon and database.strip() == "hosts" and services.strip():
                    return services.strip()
    except OSError:
        pass
    return _GLIBC_DEFAULT
