"""This machine's addresses and interfaces, and which of them face another machine."""

from __future__ import annotations

import socket
from ipaddress import ip_address


def look_up(name: str) -> list[str]:
    """Return the addresses that a name or address leads to, IPv4 first, each once.

    Raises:
        OSError: If it leads nowhere, or nobody who knows can be asked.
        UnicodeError: If it cannot be a name.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def resolve(name: str) -> list[str]:
    """Return the addresses that a name or address leads to; none if it leads nowhere.

    Addresses of loopback are left out: Debian gives a host's own name one, and other hosts that
    are handed it reach themselves.
    """
    try:
        addresses = look_up(name)
    except (OSError, UnicodeError):
        return []
    return [each for each in addresses if not ip_address(each.partition("%")[0]).is_loopback]


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return what keeps gloo and NCCL to an interface.

    NCCL would take any whose name begins so; ``=`` means this very name.
    """
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def is_address(host: str) -> bool:
    """Whether a text is an address, not a name."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def own_address_towards(address: str) -> str | None:
    """Return the address of this machine that others behind ``address`` see; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def own_addresses() -> dict[str, str]:
    """Return the interface of each address of this machine, loopback among them."""
    import psutil

    return {
        entry.address.partition("%")[0]: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
