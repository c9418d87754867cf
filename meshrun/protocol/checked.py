"""Types of values from other machines, validated when they are decoded. Pure."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

_LATEST_NS = 2**62
_MOST = 2**31

if TYPE_CHECKING:
    Line = str
    Time = int
else:
    # `packing.convert` checks these itself, as msgspec does not know them.
    class Line(ABC):  # noqa: B024 - stands for str
        """Text to display, sanitized."""

    class Time(ABC):  # noqa: B024 - stands for int
        """Monotonic nanoseconds by the receiver's clock, as far as it knows the sender's."""

    Line.register(str)
    Time.register(int)

ClockTime = Annotated[int, Meta(ge=-_LATEST_NS, le=_LATEST_NS)]
"""Monotonic nanoseconds by the sender's clock."""
ExitCode = Annotated[int, Meta(ge=0, le=255)]
Signum = Annotated[int, Meta(ge=0, le=64)]
"""A signal, or 0 for none."""
Rank = Annotated[int, Meta(ge=0, le=_MOST)]
Generation = Annotated[int, Meta(ge=0, le=_MOST)]
Size = Annotated[int, Meta(ge=0, le=_MOST)]
"""How many ranks or nodes."""
Seconds = Annotated[float, Meta(ge=0, le=10**12)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Secret = Annotated[str, Meta(max_length=64)]
