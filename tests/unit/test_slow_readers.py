"""Readers of our own output that take it late, or not at all."""

import os
from collections.abc import Iterator
from threading import Thread

import pytest

from meshrun.console.console import Console


@pytest.fixture
def full() -> Iterator[tuple[int, Console]]:
    """The end of a pipe to read from, and a console that finds no room in it."""
    reader, writer = os.pipe()
    console = Console(writer)
    while not console.waiting:
        console.print_line(b"." * 10_000, to_stderr=False)
    try:
        yield reader, console
    finally:
        os.close(writer)
        os.close(reader)


def test_the_last_words_wait_for_their_reader(full: tuple[int, Console]) -> None:
    """What was printed last is there once the wait is over."""
    reader, console = full
    console.print_line(b"the end", to_stderr=False)
    read = bytearray()

    def read_all() -> None:
        while not read.endswith(b"the end\n"):
            read.extend(os.read(reader, 1 << 16))

    thread = Thread(target=read_all, daemon=True)
    thread.start()
    console.wait_for_readers(lambda: None)
    thread.join(60)

    assert read.endswith(b".\nthe end\n")


def test_readers_have_only_so_long(full: tuple[int, Console]) -> None:
    """Nobody reads: the wait ends with its time, and nothing is kept for later."""
    left = iter([0.01, 0.0])
    full[1].wait_for_readers(lambda: next(left))

    assert full[1].waiting == []
