"""Names of hosts. Pure."""

from __future__ import annotations


def first_label(host: str) -> str:
    """Return a host's name without its domain and in lower case; an address as it is."""
    is_address = ":" in host or host.replace(".", "").isdecimal()
    return host if is_address else host.partition(".")[0].lower()
