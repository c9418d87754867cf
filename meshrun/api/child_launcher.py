"""The launcher as a child of a program that calls ``meshrun.launch()``.

A launcher adopts orphans, catches signals and waits for any child, which would disturb the process
of a notebook or a test runner.
"""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOBase
from typing import IO, Any, TextIO

from meshrun.api.deferred_signals import interrupts, signals_deferred
from meshrun.host.processes import interrupts_delayed
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import reporting_shortages

AnyStream = TextIO | TextIOBase
_READ_BYTES = 1 << 16
_ESCALATION = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def run_launcher(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, stdin: int | None
) -> int:
    """Run a launcher to its end; its output goes to ``sys.stdout`` and ``sys.stderr``.

    It has a session of its own, so that Ctrl-C at the terminal reaches it only through this
    process: the first as SIGINT, the second as SIGTERM, the third as SIGKILL.

    ``env`` is its whole environment; ``cwd`` and ``stdin`` are as for ``subprocess``.

    Returns:
        Its exit code; -n if signal n ended it.

    Raises:
        KeyboardInterrupt: After the launcher's end, if this process received SIGINT.
        HostError: If this machine is out of processes, memory or descriptors.
        OSError: If the launcher could not be started.
    """
    streams = {1: sys.stdout, 2: sys.stderr}
    process = None
    with _forward_interrupts() as counted:
        try:
            with signals_deferred(), interrupts_delayed(), reporting_shortages():
                process = subprocess.Popen(
                    list(command),
                    env=dict(env),
                    cwd=cwd,
                    stdin=stdin,
                    stdout=None if _leads_to(streams[1], 1) else subprocess.PIPE,
                    stderr=None if _leads_to(streams[2], 2) else subprocess.PIPE,
                    start_new_session=True,
                )
            counted.attach(process)
            pipes = ((process.stdout, streams[1]), (process.stderr, streams[2]))
            copy_output([(pipe, stream) for pipe, stream in pipes if pipe is not None])
            return process.wait()
        finally:
            if process is not None:
                end_launcher(process)


class _Interrupts:
    """Counts SIGINTs and forwards each, as a stronger signal each time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.count = 0

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Forward to ``process`` from now on, including an earlier SIGINT."""
        self._process = process
        if self.count:
            process.send_signal(signal.SIGINT)

    def note(self, *_: object) -> None:
        """Handle one SIGINT."""
        self.count += 1
        if self._process is not None:
            self._process.send_signal(_ESCALATION[min(self.count, len(_ESCALATION)) - 1])


@contextmanager
def _forward_interrupts() -> Iterator[_Interrupts]:
    """Forward SIGINT while the block runs, and raise KeyboardInterrupt after it.

    A handler of the program's own, or of a launch in another thread, is left in place.
    """
    counted, handler = _Interrupts(), signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not interrupts(handler):
        yield counted
        return
    signal.signal(signal.SIGINT, counted.note)
    try:
        yield counted
    finally:
        signal.signal(signal.SIGINT, handler)
        if counted.count:
            raise KeyboardInterrupt


def _leads_to(stream: TextIO | None, descriptor: int) -> bool:
    """Return whether ``stream`` writes to ``descriptor``, as a child can; flush it if so."""
    if stream is None:
        return True
    try:
        direct = stream.fileno() == descriptor
        if direct:
            stream.flush()
    except Exception:  # pytest's, a notebook's, or a closed one
        return False
    return direct


def copy_output(pairs: Sequence[tuple[IO[bytes], AnyStream]]) -> None:
    """Copy each pipe to its stream until all are closed at the other end.

    What a stream does not take, such as a closed one or a file on a full disk, is lost.

    Raises:
        ConnectionError: If nobody reads a stream any longer.
    """
    lost: list[AnyStream] = []
    with Reactor() as reactor:

        def copy(pipe: IO[bytes], stream: AnyStream, decoder: codecs.IncrementalDecoder) -> None:
            data = os.read(pipe.fileno(), _READ_BYTES)
            try:
                write_text(stream, decoder.decode(data, final=not data))
            except ConnectionError:
                raise
            except Exception as error:
                if stream not in lost:
                    lost.append(stream)
                    why = getattr(error, "strerror", None) or error
                    with suppress(Exception):  # stderr may be on the same disk
                        text = f"meshrun: cannot write what ranks print ({why}); it is lost\n"
                        write_text(sys.stderr, text)
            if not data:
                reactor.remove(pipe)

        for pipe, stream in pairs:
            decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
            reactor.add_reader(pipe, partial(copy, pipe, stream, decoder))
        reactor.run_until(lambda: not reactor.watched)


def write_text(stream: AnyStream, text: str) -> None:
    """Write and flush; the stream may lack everything but the method ``write``."""
    if not text:
        return
    encoding: Any = getattr(stream, "encoding", None)
    if isinstance(encoding, str):  # escape what the stream cannot encode
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
    if hasattr(stream, "flush"):
        stream.flush()


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """Close a launcher's pipes, and end it if an exception interrupted the wait for it."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if process.poll() is None:
        stop_launcher(process, None)


def stop_launcher(process: subprocess.Popen[bytes], limit_s: float | None) -> None:
    """End a launcher and its ranks.

    It is killed if it does not react, as when it is stopped, or if an exception ends the wait.
    """
    process.terminate()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
