"""Two launchers prove to each other that they know the secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.rendezvous.handshake import (
    VERSION,
    HandshakeError,
    HeadHandshake,
    MemberHandshake,
    refusal,
)

SECRET = b"s" * 32
GARBAGE = [b"", b"\x00\xff", b"GET / HTTP/1.1\r", b"[]", b"7", b"{", b'{"meshrun": 1}', b"[" * 900]
NO_LAUNCHER = "what answers is no launcher of meshrun"


def line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()


def test_both_sides_agree_on_a_key() -> None:
    """A new one in each conversation."""
    keys = set()
    for _ in range(2):
        head, member = HeadHandshake(SECRET), MemberHandshake(SECRET)
        assert not member.is_answered
        reply, key = head.answer(member.answer(head.greeting))
        assert member.is_answered
        assert member.finish(reply) == key
        keys.add(key)

    assert len(keys) == 2


def test_the_lines_do_not_hold_the_secret_or_the_key() -> None:
    """Whoever listens learns neither."""
    head, member = HeadHandshake(SECRET), MemberHandshake(SECRET)
    answer = member.answer(head.greeting)
    reply, key = head.answer(answer)
    said = head.greeting + answer + reply

    assert SECRET not in said
    assert key not in said
    assert key.hex().encode() not in said


def test_a_member_with_another_secret_is_refused() -> None:
    """By the head, in words for people."""
    head = HeadHandshake(SECRET)

    with pytest.raises(HandshakeError, match="another launch, or has another secret"):
        head.answer(MemberHandshake(b"other").answer(head.greeting))


def test_a_head_with_another_secret_is_refused() -> None:
    """One that lets everybody in proves nothing to the member."""
    head, member = HeadHandshake(b"other"), MemberHandshake(SECRET)
    nonce = json.loads(member.answer(head.greeting))["nonce"]
    proof = json.loads(head.answer(_as_other(head, nonce))[0])["proof"]

    with pytest.raises(HandshakeError, match="does not know this launch's secret"):
        member.finish(line({"proof": proof}))


def _as_other(head: HeadHandshake, nonce: str) -> bytes:
    """Return the line of a member that knows the other secret, with this number."""
    from meshrun.rendezvous import handshake

    nonces = f"{json.loads(head.greeting)['nonce']} {nonce}"
    return line({"nonce": nonce, "proof": handshake._proof(b"other", "member", nonces)})


def test_a_replayed_proof_is_refused() -> None:
    """The head draws a number of its own each time."""
    first = HeadHandshake(SECRET)
    heard = MemberHandshake(SECRET).answer(first.greeting)
    first.answer(heard)

    with pytest.raises(HandshakeError):
        HeadHandshake(SECRET).answer(heard)


def test_a_proof_that_is_sent_back_is_refused() -> None:
    """The two sides prove different things."""
    head, member = HeadHandshake(SECRET), MemberHandshake(SECRET)

    with pytest.raises(HandshakeError):
        member.finish(member.answer(head.greeting))


def test_another_version_is_told() -> None:
    """With both numbers."""
    greeting = line({"meshrun": VERSION + 1, "nonce": "0" * 32})

    with pytest.raises(HandshakeError, match=f"version {VERSION + 1}, and this one {VERSION}"):
        MemberHandshake(SECRET).answer(greeting)


def test_a_refusal_is_passed_on_to_people() -> None:
    """The member says what the head said."""
    member = MemberHandshake(SECRET)
    member.answer(HeadHandshake(SECRET).greeting)

    with pytest.raises(HandshakeError, match="there is no room"):
        member.finish(refusal("there is no room"))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_no_launcher(garbage: bytes) -> None:
    """Whichever side it meets."""
    member = MemberHandshake(SECRET)
    with pytest.raises(HandshakeError, match=NO_LAUNCHER):
        HeadHandshake(SECRET).answer(garbage)
    with pytest.raises(HandshakeError):
        member.answer(garbage)
    member.answer(HeadHandshake(SECRET).greeting)
    with pytest.raises(HandshakeError, match=NO_LAUNCHER):
        member.finish(garbage)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["meshrun", "nonce", "proof", "refused", "x"])


@given(said=st.binary(max_size=80) | st.dictionaries(NAMES, VALUES).map(line))
def test_nothing_else_than_a_refusal_comes_of_any_line(said: bytes) -> None:
    """A stranger cannot bring a launcher to its end with a line."""
    member = MemberHandshake(SECRET)
    member.answer(HeadHandshake(SECRET).greeting)
    for take in (HeadHandshake(SECRET).answer, member.finish):
        with pytest.raises(HandshakeError):
            take(said)
    try:
        MemberHandshake(SECRET).answer(said)
    except HandshakeError:
        return
    assert json.loads(said)["meshrun"] == VERSION
