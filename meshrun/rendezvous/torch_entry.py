"""A node's entry in torch's store, validated when read, as anyone may have written it."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, cast

from msgspec import Struct

from meshrun.errors import RendezvousError
from meshrun.protocol.checked import Line
from meshrun.protocol.packing import pack, unpack
from meshrun.rendezvous.messages import Port

_LONGEST_SECRET = 64


def _address(text: str) -> str:
    ip_address(text.partition("%")[0])
    return text


def _secret(text: str) -> str:
    if len(text) > _LONGEST_SECRET:
        raise ValueError(f"a secret of {len(text)} characters")
    return text


class NodeInfo(Struct, frozen=True, kw_only=True):
    """Where a node's launcher listens."""

    host: Line
    address: Annotated[str, _address]
    port: Port
    secret: Annotated[str, _secret]
    """Generated for this launch."""

    def to_text(self) -> str:
        """Return the entry as text."""
        return pack(self).decode()


def read_info(text: bytes, key: str) -> NodeInfo:
    """Return the entry in ``text``, found under ``key``.

    Raises:
        RendezvousError: If it is not an entry.
    """
    try:
        return cast("NodeInfo", unpack(text, NodeInfo))
    except ValueError as error:
        raise foreign(text, key, "a node's address") from error


def foreign(text: bytes, key: str, wanted: str) -> RendezvousError:
    """Return the error for a value that no launcher wrote."""
    return RendezvousError(
        f"torch's store holds {text[:40]!r} under `{key}`, expected {wanted}",
        hint="something else may be writing to that store, such as a node with another version of"
        " meshrun",
    )
