"""Restriction of name lookups to this machine during a start.

torch's store looks up the *names* of peers. The hosts file has none for
``::ffff:127.0.0.1``, so the query goes to DNS; in a burst of them, one may be lost and time out
after five seconds. meshrun passes only addresses, so a rank needs no names to connect.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_GLIBC_DEFAULT = "dns [!UNAVAIL=return] files"


@contextmanager
def names_from_files_only() -> Iterator[None]:
    """Look up host names only in the hosts file during the block; with glibc only.

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
