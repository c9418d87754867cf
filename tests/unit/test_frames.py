"""Frames between launchers: whatever is done to the bytes, what comes out was sent."""

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
    """The network keeps no boundaries."""
    sent = b"".join(frames(texts))
    ends = sorted({0, *(cut for cut in cuts if cut < len(sent)), len(sent)})
    reader = FrameReader(KEY, "participant")
    pieces = [sent[start:end] for start, end in pairwise(ends)]

    assert [text for piece in pieces for text in reader.feed(piece)] == texts


@given(texts=TEXTS, data=st.data())
def test_a_flipped_bit_is_refused(texts: list[bytes], data: st.DataObject) -> None:
    """In length, mark or text: no text comes out that was not sent before it."""
    sent = bytearray(b"".join(frames(texts)))
    at = data.draw(st.integers(0, len(sent) * 8 - 1))
    sent[at // 8] ^= 1 << at % 8
    reader = FrameReader(KEY, "participant")
    got: list[bytes] = []
    try:
        got += reader.feed(bytes(sent))
    except FrameError:
        return

    # A longer length makes the reader wait for bytes that never come, and it gives nothing more.
    assert got == texts[: len(got)]
    assert len(got) < len(texts)


@pytest.mark.parametrize(
    "order",
    [[0, 0], [1, 0, 2], [0, 2], [1], [0, 1, 1], [2, 1, 0]],
    ids=["repeated", "reordered", "left out", "first left out", "sent again later", "backwards"],
)
def test_the_order_of_frames_cannot_be_changed(order: list[int]) -> None:
    """Each carries its number in its mark."""
    sent = frames([b"a", b"b", b"c"])

    with pytest.raises(FrameError, match="not signed with this launch's key"):
        FrameReader(KEY, "participant").feed(b"".join(sent[number] for number in order))


def test_a_frame_cannot_be_sent_back() -> None:
    """The two directions have different marks."""
    (sent,) = frames([b"a"], direction="coordinator")

    assert FrameReader(KEY, "coordinator").feed(sent) == [b"a"]
    with pytest.raises(FrameError):
        FrameReader(KEY, "participant").feed(sent)


def test_another_key_is_refused() -> None:
    """Also for an empty text."""
    with pytest.raises(FrameError):
        FrameReader(KEY, "participant").feed(frames([b""], key=b"K" * 32)[0])


def test_a_length_beyond_the_limit_is_refused_before_it_is_waited_for() -> None:
    """Nobody has this launcher hold gigabytes."""
    with pytest.raises(FrameError, match=f"a frame of {LONGEST + 1} bytes"):
        FrameReader(KEY, "participant").feed((LONGEST + 1).to_bytes(4, "big"))
