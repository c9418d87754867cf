"""Messages to stderr, in color on a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from meshrun.host.descriptors import LostOutputError
from meshrun.host.printable import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_COLORS = {"error:": "1;31", "hint:": "1;36"}
_COLORED = re.compile("^(?:" + "|".join(_COLORS) + ")", re.MULTILINE)
_formats: list[Callable[[str], str]] = []


def is_terminal(fd: int) -> bool:
    """Return whether a descriptor is a terminal that a person may be looking at.

    mpirun and ``srun --unbuffered`` give each process a pseudo-terminal as its output, and copy it
    to their own output, which may be a file. With ``srun --pty``, stdin is a terminal as well.
    """
    is_copied = "OMPI_COMM_WORLD_RANK" in os.environ
    is_copied |= "SLURM_STEP_ID" in os.environ and not os.isatty(0)
    return os.isatty(fd) and not is_copied


def has_colors(fd: int) -> bool:
    """Return whether a descriptor is a terminal with colors, and the user has not disabled them."""
    can = is_terminal(fd) and os.environ.get("TERM", "") not in {"", "dumb"}
    return can and not os.environ.get("NO_COLOR")


def set_message_format(render: Callable[[str], str]) -> None:
    """Make :func:`say` print what ``render`` returns for each text from now on."""
    _formats.append(render)


def note(text: str) -> None:
    """Print a message of meshrun's own to stderr, as :func:`say` does."""
    say(printable(f"meshrun: {text}"))


def say(text: str) -> None:
    """Print to stderr, with ``error:`` and ``hint:`` in color on a terminal.

    Continue if the terminal has hung up or the disk is full.
    """
    text = _formats[-1](text) if _formats else text
    if has_colors(2) and not _formats:
        text = _COLORED.sub(lambda found: f"\033[{_COLORS[found[0]]}m{found[0]}\033[0m", text)
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)


class _PatientFile(io.FileIO):
    """Waits for a slow reader even if another process has made the descriptor non-blocking."""

    def write(self, data: ReadableBuffer, /) -> int:
        written: int | None
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LostOutputError(error.errno, error.strerror) from error
        return written


def patient(stream: TextIO) -> TextIO:
    """Return a stream to the same file that loses nothing if the descriptor is non-blocking.

    ssh and other programs leave a terminal that way, for all processes that use it; Python drops
    what the reader does not take at once.
    """
    buffer = getattr(stream, "buffer", None)
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(
        getattr(buffer, "raw", buffer), io.FileIO
    ):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_PatientFile(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


def discard_output(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device, with what it has buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
