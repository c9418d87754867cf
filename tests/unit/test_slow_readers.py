"""Readers of meshrun's output that read late, or not at all."""

import os
from collections.abc import Iterator
from threading import Thread

import pytest

from meshrun.console.console import Console


@pytest.fixture
def full() -> Iterator[tuple[int, Console]]:
    """Give the read end of a full pipe, and the console that has filled it."""
    reader, writer = os.pipe()
    console = Console(writer)
    while not console.waiting:
        console.print_line(b"." * 10_000, to_stderr=False)
    try:
        yield reader, console
    finally:
        os.close(writer)
        os.close(reader)


def test_the_last_output_waits_for_its_reader(full: tuple[int, Console]) -> None:
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


def test_readers_have_a_limited_time(full: tuple[int, Console]) -> None:
    """If nothing reads, the wait ends and the rest is dropped."""
    left = iter([0.01, 0.0])
    full[1].wait_for_readers(lambda: next(left))

    assert full[1].waiting == []
