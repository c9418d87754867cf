"""Types of values from other machines, validated when they are decoded. Pure."""

from __future__ import annotations

import os
from ipaddress import ip_address
from typing import Annotated

from meshrun.host.printable import one_line
from meshrun.protocol.packing import BY_CLOCK, Within

_LATEST_NS = 2**62
_MOST = 2**31
_LONGEST_SECRET = 64


def _wait_status(status: int) -> int:
    """Return the wait status of a process that has ended."""
    Within(0, 0xFFFF)(status)
    os.waitstatus_to_exitcode(status)
    return status


def _address(text: str) -> str:
    ip_address(text.partition("%")[0])
    return text


def _secret(text: str) -> str:
    if len(text) > _LONGEST_SECRET:
        raise ValueError(f"a secret of {len(text)} characters")
    return text


Line = Annotated[str, one_line]
"""Text to display, sanitized."""
ClockTime = Annotated[int, Within(-_LATEST_NS, _LATEST_NS)]
"""Monotonic nanoseconds by the sender's clock."""
Time = Annotated[ClockTime, BY_CLOCK]
"""Monotonic nanoseconds by the receiver's clock, as far as it knows the sender's."""
ExitCode = Annotated[int, Within(0, 255)]
Signum = Annotated[int, Within(0, 64)]
"""A signal, or 0 for none."""
Rank = Annotated[int, Within(0, _MOST)]
Generation = Annotated[int, Within(0, _MOST)]
Seconds = Annotated[float, Within(0, 10**12)]
Address = Annotated[str, _address]
Port = Annotated[int, Within(1, 65_535)]
Secret = Annotated[str, _secret]
WaitStatus = Annotated[int, _wait_status]
"""As ``os.waitpid`` gives it."""
