"""Whole lines from a stream of bytes."""

from hypothesis import given
from hypothesis import strategies as st

from meshrun.console.lines import LONGEST_LINE_BYTES, LineAssembler, Piece


def show(chunks: list[bytes], prefix: bytes = b"[a] ") -> list[Piece]:
    assembler = LineAssembler(prefix)
    pieces = [piece for chunk in chunks for piece in assembler.feed(chunk)]
    return pieces + assembler.finish()


def texts(pieces: list[Piece]) -> bytes:
    return b"".join(piece.text for piece in pieces)


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_no_byte_is_lost_or_moved(chunks: list[bytes]) -> None:
    """However the stream is divided into reads."""
    whole = b"".join(chunks)
    shown = texts(show(chunks, b""))

    assert shown.replace(b"\r", b"").rstrip(b"\n") == whole.replace(b"\r", b"").rstrip(b"\n")


@given(st.binary(max_size=200), st.integers(1, 199))
def test_where_a_read_ends_does_not_matter(data: bytes, cut: int) -> None:
    """One read or two give the same text."""
    assert texts(show([data])) == texts(show([data[:cut], data[cut:]]))


def test_each_line_gets_its_prefix_once_whole() -> None:
    """Half a line waits for the rest."""
    assert show([b"one\ntw", b"o\nthree"]) == [
        Piece(b"[a] one\n"),
        Piece(b"[a] two\n"),
        Piece(b"[a] three\n"),
    ]


def test_progress_states_are_distinguished_from_lines() -> None:
    """A progress bar's states replace each other; the last one is a line."""
    assert show([b"\r10%", b"\r50%\r100%", b"\nnext\n"]) == [
        Piece(b"[a] 10%\r", is_state=True),
        Piece(b"[a] 50%\r", is_state=True),
        Piece(b"[a] 100%\n[a] next\n"),
    ]


def test_windows_line_ends_are_line_ends() -> None:
    r"""\r\n ends a line even if it is split between two reads."""
    assert show([b"one\r", b"\ntwo\r\n"]) == [Piece(b"[a] one\r\n"), Piece(b"[a] two\r\n")]


def test_bytes_that_are_not_text_pass_through() -> None:
    """Nothing is decoded, so decoding cannot fail."""
    assert show([b"\xff\xfe\x00\n"]) == [Piece(b"[a] \xff\xfe\x00\n")]


@given(st.integers(1, 3), st.sampled_from(["x", "\u2603", "\U0001f600"]))
def test_an_endless_line_is_passed_on_in_parts(times: int, character: str) -> None:
    """Memory stays bounded, and no character is split."""
    size = len(character.encode())
    data = character.encode() * (times * LONGEST_LINE_BYTES // size + 1)
    assembler = LineAssembler(b"")
    pieces = [
        piece
        for start in range(0, len(data), 1000)
        for piece in assembler.feed(data[start : start + 1000])
    ]

    assert len(assembler.pending) <= LONGEST_LINE_BYTES
    shown = texts(pieces + assembler.finish())
    assert shown.replace(b"\n", b"") == data
    for part in shown.split(b"\n"):
        part.decode()
