"""Readers of meshrun's output that read late, or not at all, and files that are full for a time."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
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
    console.drain(lambda: None)
    thread.join(60)

    assert read.endswith(b".\nthe end\n")


def test_readers_have_a_limited_time(full: tuple[int, Console]) -> None:
    """If nothing reads, the wait ends and the rest is dropped."""
    left = iter([0.01, 0.0])
    full[1].drain(lambda: next(left))

    assert full[1].waiting == []


def test_a_file_that_has_room_again(tmp_path: Path) -> None:
    """Whole lines follow, and a line says how much is missing."""
    with open(tmp_path / "out", "wb", buffering=0) as out:
        console = Console(out.fileno(), out.fileno())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12, limits[1]))
        try:
            for line in (b"before", b"partial", b"lost"):
                console.print_line(line, to_stderr=False)
                console.note_lost_output()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        console.print_line(b"after", to_stderr=True)
        console.note_lost_output()

    before, partial, after, note = (tmp_path / "out").read_text().splitlines()
    assert (before, partial, after) == ("before", "parti", "after")
    assert note == "meshrun: writing to stdout works again; dropped 89 bytes"
