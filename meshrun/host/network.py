"""This machine's addresses and interfaces, and sockets that listen, or connect without blocking."""

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
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from operator import itemgetter
from typing import Any

from meshrun.errors import HostError, UsageError
from meshrun.host.forked_call import ForkedCall
from meshrun.host.host_names import is_address
from meshrun.host.rank_variables import GLOO_INTERFACE, NCCL_INTERFACE
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import describe_shortage

_NOWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, 3849): a route to them is the default route."""
_GVISOR = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
"""The kernel version that gVisor reports; newer ones also have `gvisor` in the release."""
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


def look_up(name: str) -> list[str]:
    """Return the distinct addresses of a name or address, IPv4 first.

    Raises:
        OSError: If it has none, or no name server answers.
        UnicodeError: If it cannot be a name.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(address_of(entry[4]) for entry in found))


def address_of(sockaddr: tuple[Any, ...]) -> str:
    """Return the address in a socket address; a link-local one includes its interface."""
    address, zone = str(sockaddr[0]), sockaddr[3] if len(sockaddr) > 3 else 0
    return f"{address}%{socket.if_indextoname(zone)}" if zone and "%" not in address else address


def sockaddr_of(address: str, port: int) -> tuple[Any, ...]:
    """Return the socket address of an address and a port: the inverse of :func:`address_of`.

    Raises:
        OSError: If this machine does not have the address's interface.
    """
    bare, percent, zone = address.partition("%")
    if not percent:
        return address, port
    return bare, port, 0, int(zone) if zone.isdecimal() else socket.if_nametoindex(zone)


def with_interface_of(address: str, own: str) -> str:
    """Return ``address`` with the interface of ``own`` if both are link-local."""
    bare, zone = address.partition("%")[0], own.partition("%")[2]
    return f"{bare}%{zone}" if zone and bare.lower().startswith("fe80:") else address


def resolve(name: str) -> list[str]:
    """Return the addresses of a name or address, if any.

    Loopback addresses are omitted: Debian assigns one to a host's own name, and other hosts that
    received it would reach themselves.
    """
    try:
        addresses = look_up(name)
    except (OSError, UnicodeError):
        return []
    return [each for each in addresses if not ip_address(each.partition("%")[0]).is_loopback]


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that restrict gloo and NCCL to an interface; none in gVisor.

    To NCCL, a name is a prefix unless ``=`` precedes it. gloo uses the first address of an
    interface. gVisor lists them in a different order each time, so some ranks would use an IPv4
    address and others an IPv6 one, which cannot connect.
    """
    system = os.uname()
    is_gvisor = "gvisor" in system.release or system.version == _GVISOR
    if interface is None or is_gvisor:
        return {}
    return {GLOO_INTERFACE: interface, NCCL_INTERFACE: f"={interface}"}


def is_unspecified(address: str) -> bool:
    """Return whether listening on an address means listening on all of this machine's."""
    return is_address(address) and ip_address(address.partition("%")[0]).is_unspecified


def own_address_towards(address: str) -> str | None:
    """Return this machine's address on the route to ``address``, without sending anything."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(sockaddr_of(address, 9))
        except OSError:
            return None
        return address_of(probe.getsockname())


def networks_of_interfaces() -> tuple[tuple[str, str], ...]:
    """Return (interface, network) of each address that is neither loopback nor link-local."""
    found = ((name, str(ip_network(text, strict=False))) for name, text in addresses_in_networks())
    return tuple(dict.fromkeys(found))


def addresses_in_networks() -> Iterator[tuple[str, str]]:
    """Yield (interface, ``10.0.0.4/16``) of each address as for :func:`networks_of_interfaces`."""
    for interface, text, netmask in sorted(_addresses(), key=itemgetter(0)):
        address = ip_address(text)
        if netmask and not (address.is_loopback or address.is_link_local):
            yield interface, f"{address}/{int(ip_address(netmask)).bit_count()}"


def own_addresses() -> dict[str, str]:
    """Return the interface of each address of this machine, including loopback."""
    return {address: interface for interface, address, _ in _addresses()}


def _addresses() -> Iterator[tuple[str, str, str]]:
    """Yield (interface, address, netmask or "") of each address of this machine."""
    import psutil

    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield interface, entry.address.partition("%")[0], entry.netmask or ""


def interface_of(address: str) -> str | None:
    """Return the interface with an address, or ``None`` if this machine does not have it."""
    return own_addresses().get(address.partition("%")[0])


def outward_address() -> str | None:
    """Return the address that faces other machines, if there is one.

    That is the address of the default route, or else the only one that is not loopback.
    """
    for nowhere in _NOWHERE:
        if (found := own_address_towards(nowhere)) is not None and not is_loopback(found):
            return found
    outward = [
        address
        for address in own_addresses()
        if not is_loopback(address) and not address.lower().startswith("fe80")
    ]
    preferred = [address for address in outward if ":" not in address] or outward
    return preferred[0] if len(preferred) == 1 else None


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return address.startswith("127.") or address == "::1"


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

    ``answered`` is called with the addresses and, if there are none, the reason.
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
        HostError: As :func:`listen_on`, and UsageError likewise.
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
