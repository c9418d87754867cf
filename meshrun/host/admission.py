"""Restriction of a listening socket to known machines: the kernel drops packets from others.

This is for sockets that other code serves without authentication, such as torch's store. A classic
BPF filter sees each packet before the socket does. Some kernels require CAP_NET_ADMIN for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

_SO_ATTACH_FILTER = 26
_LOAD, _LOAD_BYTE, _AND, _IF_EQUAL, _GO, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000
_WHOLE = 0xFFFF_FFFF
_Step = tuple[int, int, int, int]
"""Code, steps to skip if true, steps to skip if false, and a number."""


def admit_only(listener: socket.socket, addresses: Iterable[str]) -> None:
    """Make the kernel drop packets to a listening socket from all other addresses.

    This also closes all connections that are waiting to be accepted.

    Raises:
        OSError: If the system has no such filters, or the filter would be too long.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, "requires Linux")
    steps = _build_filter(addresses)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    timeout = listener.gettimeout()
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            with contextlib.suppress(ConnectionError, InterruptedError):
                listener.accept()[0].close()
    listener.settimeout(timeout)


def _build_filter(addresses: Iterable[str]) -> list[_Step]:
    """Return the steps that accept a packet if it comes from one of ``addresses``."""
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
        steps_v4 += [(_IF_EQUAL, 0, 1, int(known)), (_RETURN, 0, 0, _WHOLE)]
    steps_v6: list[_Step] = []
    for other in sorted(v6):
        words = struct.unpack(">4I", other.packed)
        for number, word in enumerate(words):
            to_next = 2 * (len(words) - number) - 1
            steps_v6 += [(_LOAD, 0, 0, _NETWORK_HEADER + 8 + 4 * number)]
            steps_v6 += [(_IF_EQUAL, 0, to_next, word)]
        steps_v6.append((_RETURN, 0, 0, _WHOLE))
    refuse: _Step = (_RETURN, 0, 0, 0)
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
