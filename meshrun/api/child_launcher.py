"""The launcher as a child of a program that calls ``meshrun.launch()``.

A launcher adopts orphans, catches signals and waits for any child, which is no business of a
notebook's or a test runner's own process.
"""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, TextIO

from meshrun.host.reactor import Reactor

_READ_BYTES = 1 << 16
_ESCALATION = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_launcher(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, stdin: int | None
) -> int:
    """Run a launcher to its end; its output goes where ``sys.stdout`` and ``sys.stderr`` lead.

    It has a session of its own, so a Ctrl-C at the terminal reaches it once, through this
    process: the first as SIGINT, the second as SIGTERM, the third as SIGKILL.

    Args:
        command: The words that start it.
        env: Its whole environment.
        cwd: Its working folder; this process's if ``None``.
        stdin: Its standard input, as for ``subprocess``; this process's if ``None``.

    Returns:
        Its exit code; -n if signal n ended it.

    Raises:
        KeyboardInterrupt: After its end, if SIGINT came.
        OSError: If it could not be started.
    """
    streams = {1: sys.stdout, 2: sys.stderr}
    with _interrupts_passed_on() as interrupts:
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=None if _leads_to(streams[1], 1) else subprocess.PIPE,
            stderr=None if _leads_to(streams[2], 2) else subprocess.PIPE,
            start_new_session=True,
        )
        try:
            interrupts.attach(process)
            pipes = ((process.stdout, streams[1]), (process.stderr, streams[2]))
            copy_output([(pipe, stream) for pipe, stream in pipes if pipe is not None])
            return process.wait()
        finally:
            end_launcher(process)


class _Interrupts:
    """Counts SIGINT and hands each on, with growing force."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.count = 0

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Send to ``process`` from now on, and what has come already."""
        self._process = process
        if self.count:
            process.send_signal(signal.SIGINT)

    def note(self, *_: object) -> None:
        """Handle one SIGINT."""
        self.count += 1
        if self._process is not None:
            self._process.send_signal(_ESCALATION[min(self.count, len(_ESCALATION)) - 1])


@contextmanager
def _interrupts_passed_on() -> Iterator[_Interrupts]:
    """Pass SIGINT on while the block runs, and raise KeyboardInterrupt after it.

    A handler of the program's own is left in place; so is the one of another thread's launch.
    """
    interrupts = _Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts.count:
            raise KeyboardInterrupt


def _leads_to(stream: TextIO | None, descriptor: int) -> bool:
    """Whether a child may write to ``descriptor`` itself; what is held back goes out first."""
    if stream is None:
        return True
    try:
        direct = stream.fileno() == descriptor
        if direct:
            stream.flush()
    except (AttributeError, OSError, ValueError):  # pytest's, a notebook's, or a closed one
        return False
    return direct


def copy_output(pairs: Sequence[tuple[IO[bytes], TextIO]]) -> None:
    """Copy each pipe to its stream as it comes, until all are closed at the other end."""
    with Reactor() as reactor:

        def copy(pipe: IO[bytes], stream: TextIO, decoder: codecs.IncrementalDecoder) -> None:
            data = os.read(pipe.fileno(), _READ_BYTES)
            write_text(stream, decoder.decode(data, final=not data))
            if not data:
                reactor.remove(pipe)

        for pipe, stream in pairs:
            decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
            reactor.add_reader(pipe, partial(copy, pipe, stream, decoder))
        reactor.run_until(lambda: not reactor.watched)


def write_text(stream: TextIO, text: str) -> None:
    """Write and flush; a stream may have no more than the method ``write``."""
    if not text:
        return
    encoding: Any = getattr(stream, "encoding", None)
    if isinstance(encoding, str):  # what the stream cannot say is spelled, not lost
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
    if hasattr(stream, "flush"):
        stream.flush()


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a launcher whose caller was interrupted by something else."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait()
        finally:
            process.kill()  # no effect, unless the wait was cut short too
            process.wait()
