"""This machine's addresses and interfaces, and those that face other machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from operator import itemgetter
from typing import Any

from meshrun.host.host_names import is_address
from meshrun.host.rank_variables import GLOO_INTERFACE, NCCL_INTERFACE

_NOWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737, 3849): a route to them is the default route."""
_GVISOR = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
"""The kernel version that gVisor reports; newer ones also have `gvisor` in the release."""


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
