"""How two launchers prove to each other that they know the secret. Pure.

Before any frame, they exchange lines of JSON: the coordinator's greeting with a nonce and its
address, the participant's nonce and proof, the coordinator's proof. No proof is valid for another
connection.
"""

from __future__ import annotations

import hmac
import json
import secrets
from ipaddress import ip_address
from typing import Any

from meshrun.host.host_names import is_address
from meshrun.host.printable import one_line

VERSION = 5
"""The version of the protocol between launchers; different versions do not connect."""
LONGEST_LINE = 1024
NO_LAUNCHER = "the other end is not a meshrun launcher"


class HandshakeError(Exception):
    """The peer is not a launcher of this launch; the text says why."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


class WrongSecretError(HandshakeError):
    """The peer is a launcher that does not know the secret."""


class TranslatedAddressError(HandshakeError):
    """The network translates the address through which the coordinator was reached.

    As that of a Kubernetes Service, which forwards no other port.

    Attributes:
        address: The coordinator's own address.
    """

    def __init__(self, address: str) -> None:
        super().__init__(f"its own address is {address}")
        self.address = address


class CoordinatorHandshake:
    """The listening side: sends :attr:`greeting`, then answers one line with one line.

    Args:
        secret: The key that only launchers of this launch know.
        address: Its own address of this connection.
    """

    def __init__(self, secret: bytes, address: str = "") -> None:
        self._secret = secret
        self._nonce = secrets.token_hex(16)
        self.greeting = _line({"meshrun": VERSION, "nonce": self._nonce, "address": address})

    def answer(self, line: bytes) -> tuple[bytes, bytes]:
        """Return (the line to send, the key of the connection).

        Raises:
            HandshakeError: If the participant does not know the secret.
        """
        values = _read(line)
        nonces = f"{self._nonce} {_text(values, 'nonce')}"
        if not hmac.compare_digest(
            _proof(self._secret, "participant", nonces), _text(values, "proof")
        ):
            raise WrongSecretError("it belongs to another launch or has a different secret")
        reply = _line({"proof": _proof(self._secret, "coordinator", nonces)})
        return reply, _key(self._secret, nonces)


class ParticipantHandshake:
    """The connecting side: answers the greeting, then checks the coordinator's proof.

    Args:
        secret: The key that only launchers of this launch know.
        address: The address to which it has connected; "" if it may be translated.
    """

    def __init__(self, secret: bytes, address: str = "") -> None:
        self._secret, self._address = secret, address
        self._nonces = ""

    @property
    def is_answered(self) -> bool:
        """Whether the greeting was answered."""
        return bool(self._nonces)

    def answer(self, greeting: bytes) -> bytes:
        """Return the line to send.

        Raises:
            HandshakeError: If the peer is not a launcher, or has another version.
            TranslatedAddressError: If its own address is another one.
        """
        values = _read(greeting)
        version = values.get("meshrun")
        if version != VERSION:
            raise HandshakeError(
                f"its meshrun speaks protocol version {version!r}, but this one speaks {VERSION}"
            )
        if self._address and _is_translated(self._address, own := _text(values, "address")):
            raise TranslatedAddressError(own)
        nonce = secrets.token_hex(16)
        self._nonces = f"{_text(values, 'nonce')} {nonce}"
        proof = _proof(self._secret, "participant", self._nonces)
        return _line({"nonce": nonce, "proof": proof})

    def finish(self, line: bytes) -> bytes:
        """Return the key of the connection.

        Raises:
            HandshakeError: If the coordinator rejected this node, or does not know the secret.
        """
        values = _read(line)
        if "rejected" in values:
            raise HandshakeError(_text(values, "rejected"))
        if not hmac.compare_digest(
            _proof(self._secret, "coordinator", self._nonces), _text(values, "proof")
        ):
            raise HandshakeError("it does not have this launch's secret")
        return _key(self._secret, self._nonces)


def rejection(reason: str) -> bytes:
    """Return the line that rejects a participant."""
    return _line({"rejected": reason})


def _is_translated(used: str, own: str) -> bool:
    """Return whether the coordinator has another address, at which it may be reached as well."""
    if not is_address(own):
        return False
    ours, theirs = (ip_address(each.partition("%")[0]) for each in (used, own))
    is_far = theirs.is_loopback and not ours.is_loopback
    return ours != theirs and not (is_far or theirs.is_link_local)


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _read(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise HandshakeError(NO_LAUNCHER)
    return values


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value.isascii():
        raise HandshakeError(NO_LAUNCHER)
    return value


def _proof(secret: bytes, side: str, nonces: str) -> str:
    return hmac.new(secret, f"{side} {VERSION} {nonces}".encode(), "sha256").hexdigest()


def _key(secret: bytes, nonces: str) -> bytes:
    return hmac.digest(secret, f"key {VERSION} {nonces}".encode(), "sha256")
