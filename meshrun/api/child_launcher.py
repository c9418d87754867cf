"""The launcher as a child of a program that calls ``meshrun.launch()``: its signals and its output.

A launcher adopts orphans, catches signals and waits for any child, which would disturb the process
of a notebook or a test runner.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOBase
from typing import IO, Any, TextIO

from meshrun.host.processes import interrupts_delayed
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import reporting_shortages
from meshrun.protocol.caller import ended_call
from meshrun.supervisor.signals import SignalQueue

AnyStream = TextIO | TextIOBase
_READ_BYTES = 1 << 16
_ESCALATION = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_OUTPUT_S = 2.0
"""How long to wait for the output of a call whose end is not marked."""


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
    with _forward_interrupts() as attach:
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
            attach(process)
            pipes = ((process.stdout, streams[1]), (process.stderr, streams[2]))
            copy_output([(pipe, stream) for pipe, stream in pipes if pipe is not None])
            return process.wait()
        finally:
            if process is not None:
                end_launcher(process)


@contextmanager
def _forward_interrupts() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward SIGINT while the block runs, and raise KeyboardInterrupt after it.

    A handler of the program's own, or of a launch in another thread, is left in place.

    Yields:
        A function that takes the process to forward to, also an earlier SIGINT.
    """
    handler, count = signal.getsignal(signal.SIGINT), 0
    process: subprocess.Popen[bytes] | None = None

    def attach(to: subprocess.Popen[bytes]) -> None:
        nonlocal process
        process = to
        if count:
            process.send_signal(signal.SIGINT)

    def forward(*_: object) -> None:
        nonlocal count
        count += 1
        if process is not None:
            process.send_signal(_ESCALATION[min(count, len(_ESCALATION)) - 1])

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not interrupts(handler):
        yield attach
        return
    signal.signal(signal.SIGINT, forward)
    try:
        yield attach
    finally:
        signal.signal(signal.SIGINT, handler)
        if count:
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


def interrupts(handler: object) -> bool:
    """Return whether a handler of SIGINT is Python's, or that of ``asyncio.run()``.

    asyncio's only cancels a task, which has no effect before our function returns.
    """
    asyncios = getattr(getattr(handler, "func", None), "__module__", "") == "asyncio.runners"
    return handler is signal.default_int_handler or asyncios


@contextmanager
def signals_deferred(
    reactor: Reactor | None = None, interrupt: Callable[[], None] | None = None
) -> Iterator[None]:
    """Defer Python's signal handlers until the end of the block.

    Args:
        reactor: Calls them in its turns instead, if given.
        interrupt: What Ctrl-C does in such a turn, unless the program handles it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[[int, None], object]] = {
        signum: handler
        for signum in signal.valid_signals()
        if callable(handler := signal.getsignal(signum))
    }
    signals = SignalQueue((), always=handlers, even_if_blocked=False)

    def call_handlers() -> None:
        for signum in signals.take():
            if interrupt is not None and interrupts(handlers[signum]):
                interrupt()
            else:
                handlers[signum](signum, None)

    if reactor is not None:
        reactor.add_reader(signals, call_handlers)
    try:
        yield
    finally:
        if reactor is not None:
            reactor.remove(signals)
        late = signals.restore()
    for signum in late:
        handlers[signum](signum, None)


class RankOutput(io.TextIOBase):
    """Passes a stream of the ranks on, line by line, and notes where the output of a call ends."""

    def __init__(self, name: str, to: TextIO | None) -> None:
        self._name, self._to = name, to
        self._line = ""
        self._is_passed_on = True
        self.kept = ""
        """The output since :meth:`keep`."""
        self._complete = 0
        """The number of calls whose output is complete."""
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        """Take the next part of the stream."""
        *lines, self._line = (self._line + text).split("\n")
        shown = []
        for line in lines:
            if (number := ended_call(line)) is None:
                shown.append(f"{line}\n")
                continue
            with self._changed:
                self._complete = number + 1
                self._changed.notify_all()
        self._pass_on("".join(shown))
        return len(text)

    def keep(self) -> None:
        """Keep the output from now on instead of passing it on."""
        self._is_passed_on = False

    def wait_for(self, calls: int) -> None:
        """Wait for the output of all ranks during the first ``calls`` calls."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete >= calls, _OUTPUT_S)

    def wait_for_silence(self, seconds: float, *, most_s: float) -> str:
        """Return the kept output once nothing has followed it for a number of seconds."""
        until_s = time.monotonic() + most_s
        with self._changed:
            while time.monotonic() < until_s:
                if not self._changed.wait(seconds) and self.kept:
                    break
        return self.kept

    def close(self) -> None:
        """Pass on a last line that has not ended."""
        self._pass_on(self._line)
        self._line = ""

    def _pass_on(self, text: str) -> None:
        if not self._is_passed_on:
            with self._changed:
                self.kept += text
                self._changed.notify_all()
        elif (to := self._to or getattr(sys, self._name)) is not None:
            with suppress(Exception):  # ranks must not wait for a stream that is closed, say
                write_text(to, text)
