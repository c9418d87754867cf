"""Names and addresses of hosts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address


def is_address(host: str) -> bool:
    """Return whether a string is an address rather than a name."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def first_label(host: str) -> str:
    """Return a host's name without its domain and in lower case; an address as it is."""
    return host if is_address(host) else host.partition(".")[0].lower()


def place_of(hostname: str, hosts: Sequence[str]) -> int | None:
    """Return the index of this host, comparing the first labels of names; ``None`` if absent."""
    labels = [first_label(host) for host in hosts]
    own = first_label(hostname)
    return labels.index(own) if own in labels else None
