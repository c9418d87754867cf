"""Frames between launchers: whatever happens to the bytes, only what was sent is received."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.rendezvous.frames import LONGEST, FrameError, FrameReader, FrameWriter

KEY = b"k" * 32
TEXTS = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def frames(texts: list[bytes], *, key: bytes = KEY, direction: str = "participant") -> list[bytes]:
    writer = FrameWriter(key, direction)
    return [writer.frame(text) for text in texts]


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 600), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_texts(texts: list[bytes], cuts: list[int]) -> None:
    """The network does not keep boundaries."""
    sent = b"".join(frames(texts))
    ends = sorted({0, *(cut for cut in cuts if cut < len(sent)), len(sent)})
    reader = FrameReader(KEY, "participant")
    pieces = [sent[start:end] for start, end in pairwise(ends)]

    assert [text for piece in pieces for text in reader.feed(piece)] == texts


@given(texts=TEXTS, data=st.data())
def test_a_flipped_bit_is_rejected(texts: list[bytes], data: st.DataObject) -> None:
    """In length, signature or text: only texts before it are received."""
    sent = bytearray(b"".join(frames(texts)))
    at = data.draw(st.integers(0, len(sent) * 8 - 1))
    sent[at // 8] ^= 1 << at % 8
    reader = FrameReader(KEY, "participant")
    got: list[bytes] = []
    try:
        got += reader.feed(bytes(sent))
    except FrameError:
        return

    # With a longer length, the reader waits for bytes that never come.
    assert got == texts[: len(got)]
    assert len(got) < len(texts)


@pytest.mark.parametrize(
    "order",
    [[0, 0], [1, 0, 2], [0, 2], [1], [0, 1, 1], [2, 1, 0]],
    ids=["repeated", "reordered", "omitted", "first omitted", "repeated later", "backwards"],
)
def test_the_order_of_frames_cannot_be_changed(order: list[int]) -> None:
    """Each frame's signature includes its number."""
    sent = frames([b"a", b"b", b"c"])

    with pytest.raises(FrameError, match="not signed with this launch's key"):
        FrameReader(KEY, "participant").feed(b"".join(sent[number] for number in order))


def test_a_frame_cannot_be_sent_back() -> None:
    """The two directions have different signatures."""
    (sent,) = frames([b"a"], direction="coordinator")

    assert FrameReader(KEY, "coordinator").feed(sent) == [b"a"]
    with pytest.raises(FrameError):
        FrameReader(KEY, "participant").feed(sent)


def test_another_key_is_rejected() -> None:
    """Even for an empty text."""
    with pytest.raises(FrameError):
        FrameReader(KEY, "participant").feed(frames([b""], key=b"K" * 32)[0])


def test_a_length_beyond_the_limit_is_rejected_at_once() -> None:
    """No one can make a launcher buffer gigabytes."""
    with pytest.raises(FrameError, match=f"a frame of {LONGEST + 1} bytes"):
        FrameReader(KEY, "participant").feed((LONGEST + 1).to_bytes(4, "big"))
