"""A listening socket for known machines only: the kernel keeps the connections of others from it.

This is for sockets that other code serves without authentication, such as torch's store. Where two
sockets listen on one port, a classic BPF program selects one for each connection, before it is
established (``SO_ATTACH_REUSEPORT_CBPF`` in socket(7)). No privilege is needed.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from meshrun.host.sockets import listen_on

_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD, _LOAD_BYTE, _AND, _IF_EQUAL, _GO, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000
_SINK, _LISTENER = 0, 1
"""The sockets by number, in the order in which they began to listen."""
_Step = tuple[int, int, int, int]
"""Code, steps to skip if true, steps to skip if false, and a number."""


def listen_for(addresses: Iterable[str], on: str) -> tuple[socket.socket, socket.socket]:
    """Return a socket that listens on a free port for ``addresses``, and one that gets all others.

    Nobody serves the second one, which must stay open as long as the first. Both listen ``on`` an
    address of this machine.

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
