"""Two launchers prove to each other that they know the secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.rendezvous.handshake import (
    VERSION,
    CoordinatorHandshake,
    HandshakeError,
    ParticipantHandshake,
    TranslatedAddressError,
    rejection,
)
from tests.kit import NOT_A_LAUNCHER
from tests.parties import SECRET

GARBAGE = [b"", b"\x00\xff", b"GET / HTTP/1.1\r", b"[]", b"7", b"{", b'{"meshrun": 1}', b"[" * 900]


def line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()


def test_both_sides_agree_on_a_key() -> None:
    """A new one for each connection."""
    keys = set()
    for _ in range(2):
        coordinator, participant = CoordinatorHandshake(SECRET), ParticipantHandshake(SECRET)
        assert not participant.is_answered
        reply, key = coordinator.answer(participant.answer(coordinator.greeting))
        assert participant.is_answered
        assert participant.finish(reply) == key
        keys.add(key)

    assert len(keys) == 2


def test_the_lines_do_not_hold_the_secret_or_the_key() -> None:
    """An eavesdropper learns neither."""
    coordinator, participant = CoordinatorHandshake(SECRET), ParticipantHandshake(SECRET)
    answer = participant.answer(coordinator.greeting)
    reply, key = coordinator.answer(answer)
    sent = coordinator.greeting + answer + reply

    assert SECRET not in sent
    assert key not in sent
    assert key.hex().encode() not in sent


@pytest.mark.parametrize(
    ("used", "own", "is_translated"),
    [
        ("10.0.0.1", "10.0.0.1", False),
        ("10.96.0.7", "10.0.0.1", True),
        ("10.96.0.7", "fd00::1", True),
        ("127.0.0.1", "10.0.0.1", True),  # a tunnel that begins here
        ("10.0.0.9", "127.0.0.1", False),  # a tunnel that ends there
        ("fe80::1%eth0", "fe80::1%eth1", False),
        ("fd00::1", "fe80::1%eth1", False),
        ("", "10.0.0.1", False),
        ("10.0.0.1", "", False),
        ("10.0.0.1", "node0", False),
    ],
)
def test_a_translated_address_is_noticed(used: str, own: str, is_translated: bool) -> None:
    """Unless the coordinator's own address leads nowhere from here."""
    greeting = CoordinatorHandshake(SECRET, own).greeting
    participant = ParticipantHandshake(SECRET, used)

    if is_translated:
        with pytest.raises(TranslatedAddressError, match=own):
            participant.answer(greeting)
    else:
        participant.answer(greeting)
    assert participant.is_answered is not is_translated


def test_a_participant_with_another_secret_is_rejected() -> None:
    """With a message for the user."""
    coordinator = CoordinatorHandshake(SECRET)

    with pytest.raises(HandshakeError, match="another launch or has a different secret"):
        coordinator.answer(ParticipantHandshake(b"other").answer(coordinator.greeting))


def test_a_coordinator_with_another_secret_is_rejected() -> None:
    """A coordinator that admits everyone proves nothing to the participant."""
    coordinator, participant = CoordinatorHandshake(b"other"), ParticipantHandshake(SECRET)
    nonce = json.loads(participant.answer(coordinator.greeting))["nonce"]
    proof = json.loads(coordinator.answer(_as_other(coordinator, nonce))[0])["proof"]

    with pytest.raises(HandshakeError, match="does not have this launch's secret"):
        participant.finish(line({"proof": proof}))


def _as_other(coordinator: CoordinatorHandshake, nonce: str) -> bytes:
    """Return the line of a participant that knows the other secret, with this nonce."""
    from meshrun.rendezvous import handshake

    nonces = f"{json.loads(coordinator.greeting)['nonce']} {nonce}"
    return line({"nonce": nonce, "proof": handshake._proof(b"other", "participant", nonces)})


def test_a_replayed_proof_is_rejected() -> None:
    """The coordinator draws a new nonce each time."""
    first = CoordinatorHandshake(SECRET)
    answer = ParticipantHandshake(SECRET).answer(first.greeting)
    first.answer(answer)

    with pytest.raises(HandshakeError):
        CoordinatorHandshake(SECRET).answer(answer)


def test_a_proof_that_is_sent_back_is_rejected() -> None:
    """The two sides' proofs differ."""
    coordinator, participant = CoordinatorHandshake(SECRET), ParticipantHandshake(SECRET)

    with pytest.raises(HandshakeError):
        participant.finish(participant.answer(coordinator.greeting))


def test_another_version_is_rejected() -> None:
    """The error has both numbers."""
    greeting = line({"meshrun": VERSION + 1, "nonce": "0" * 32})

    with pytest.raises(
        HandshakeError, match=f"version {VERSION + 1}, but this one speaks {VERSION}"
    ):
        ParticipantHandshake(SECRET).answer(greeting)


def test_a_rejection_is_shown() -> None:
    """The participant's error is the coordinator's reason."""
    participant = ParticipantHandshake(SECRET)
    participant.answer(CoordinatorHandshake(SECRET).greeting)

    with pytest.raises(HandshakeError, match="there is no room"):
        participant.finish(rejection("there is no room"))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_rejected(garbage: bytes) -> None:
    """By both sides."""
    participant = ParticipantHandshake(SECRET)
    with pytest.raises(HandshakeError, match=NOT_A_LAUNCHER):
        CoordinatorHandshake(SECRET).answer(garbage)
    with pytest.raises(HandshakeError):
        participant.answer(garbage)
    participant.answer(CoordinatorHandshake(SECRET).greeting)
    with pytest.raises(HandshakeError, match=NOT_A_LAUNCHER):
        participant.finish(garbage)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["meshrun", "nonce", "proof", "rejected", "x"])


@given(sent=st.binary(max_size=80) | st.dictionaries(NAMES, VALUES).map(line))
def test_any_line_is_accepted_or_rejected(sent: bytes) -> None:
    """An outsider cannot crash a launcher with a line."""
    participant = ParticipantHandshake(SECRET)
    participant.answer(CoordinatorHandshake(SECRET).greeting)
    for take in (CoordinatorHandshake(SECRET).answer, participant.finish):
        with pytest.raises(HandshakeError):
            take(sent)
    try:
        ParticipantHandshake(SECRET).answer(sent)
    except HandshakeError:
        return
    assert json.loads(sent)["meshrun"] == VERSION
