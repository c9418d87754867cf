"""Messages between the launcher and the processes below it, as packets: encoding and decoding.

A message is one JSON value in one packet, so it is never split or joined. Nothing is unpickled,
and a packet that does not decode raises WireError.
"""

from __future__ import annotations

from meshrun.errors import InternalError
from meshrun.protocol.packing import pack_fields, to_builtins, unpack
from meshrun.protocol.zygote_messages import FromNegotiation, FromRank, FromZygote, ToZygote
from meshrun.wording import count

PACKET_BYTES = 160 * 1024
"""Largest packet; below Linux's default socket buffer of 208 KiB."""
_LONGEST_TEXT = 16 * 1024


class WireError(InternalError):
    """A packet is not a message."""


Message = ToZygote | FromZygote | FromRank | FromNegotiation


def encode(message: Message) -> bytes:
    """Return ``message`` as one packet, without the middle of texts that would not fit."""
    longest = _LONGEST_TEXT
    while True:
        values = {
            name: shorten(value, longest) if isinstance(value, str) else value
            for name, value in to_builtins(message).items()
        }
        packet = pack_fields(type(message), values)
        if len(packet) <= PACKET_BYTES or longest < 16:
            return packet
        longest //= 2


def decode(packet: bytes) -> Message:
    """Return the message in ``packet``.

    Raises:
        WireError: If the packet is not a message.
    """
    try:
        message: Message = unpack(packet, Message)
    except ValueError as error:
        raise WireError(str(error)) from error
    return message


def shorten(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return a text without its middle if it is longer than messages should be."""
    if len(text) <= longest:
        return text
    half = longest // 2
    cut = count(len(text) - 2 * half, "character")
    return f"{text[:half]}\n... {cut} left out ...\n{text[-half:]}"
