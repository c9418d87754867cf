"""Which output of its ranks a group of workers passes on, and which it keeps."""

from __future__ import annotations

import errno
import io
import os
import pickle
import signal
import sys
import tracemalloc

import pytest

from meshrun.api.child_launcher import RankOutput, copy_output
from meshrun.protocol.caller import end_of_call, ended_call
from meshrun.worker.call_channel import CallBegun, CallDone
from meshrun.worker.serve_calls import serve


def test_long_sessions_take_no_more_memory() -> None:
    """Neither output nor anything else of earlier calls is kept."""
    shown = io.StringIO()
    output = RankOutput("stdout", shown)

    def call(number: int) -> None:
        for rank in range(2):
            output.write(f"[dp{rank}] {'x' * 1000}\n")
        output.write(end_of_call(number).decode())
        output.wait_for(number + 1)
        assert shown.tell() == 2 * len(f"[dp0] {'x' * 1000}\n")
        shown.seek(0)
        shown.truncate()

    call(0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, 500):
            call(number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 20_000


def test_a_call_may_close_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still gets an answer, and so does the next call."""

    class Caller:
        """A channel that makes two calls."""

        def __init__(self) -> None:
            self.calls = [pickle.dumps((sys.stdout.close, (), {})), pickle.dumps((int, ("7",), {}))]
            self.values: list[object] = []

        def receive(self) -> bytes:
            if not self.calls:
                raise EOFError
            return self.calls.pop(0)

        def send(self, answer: CallBegun | CallDone) -> None:
            if isinstance(answer, CallDone):
                self.values.append(pickle.loads(answer.value or b""))

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    try:
        serve(caller := Caller())  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)

    assert caller.values == [None, 7]


def test_kept_output_is_not_passed_on() -> None:
    """From ``keep()`` on, and with the incomplete line before it."""
    shown = io.StringIO()
    output = RankOutput("stderr", shown)
    output.write("before\nand aft")
    output.keep()
    output.write("er\n")
    output.close()

    assert (shown.getvalue(), output.kept) == ("before\n", "and after\n")


@pytest.mark.parametrize(
    "line",
    [
        *("", "7", "\x1e", "\x1e\x1e", "\x1e7", "[dp0] \x1e7\x1e", "\x1ex\x1e"),
        f"\x1e{'7' * 5000}\x1e",
    ],
    ids=lambda line: repr(line[:9]),
)
def test_lines_that_do_not_end_a_call(line: str) -> None:
    """A rank may print them."""
    assert ended_call(line) is None
    assert ended_call(end_of_call(7).decode().removesuffix("\n")) == 7


@pytest.mark.parametrize(
    "why", [OSError(errno.ENOSPC, "No space left on device"), ValueError("I/O on closed file")]
)
def test_a_stream_that_takes_nothing_costs_a_launch_only_what_is_printed(
    why: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk, or a closed stream; it is said once."""

    class Full(io.StringIO):
        def write(self, _: str, /) -> int:
            raise why

    pairs, full = [], Full()
    for _ in range(2):
        reader, writer = os.pipe()
        os.write(writer, b"a line\n")
        os.close(writer)
        pairs.append((open(reader, "rb"), full))  # noqa: SIM115 - closed below
    copy_output(pairs)
    for pipe, _ in pairs:
        pipe.close()

    text = getattr(why, "strerror", None) or why
    assert capsys.readouterr().err == (
        f"meshrun: cannot write what ranks print ({text}); it is lost\n"
    )
