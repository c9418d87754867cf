"""Calls in a process of their own."""

import os
import signal
import time

import pytest

from meshrun.errors import InternalError
from meshrun.host.forked_call import ForkedCall


def test_what_a_call_returns() -> None:
    """It may be any value, and larger than a pipe holds."""
    call = ForkedCall(lambda: (os.getpid(), "x" * 200_000))

    found = call.take()

    assert found is not None
    assert found[0] != os.getpid()
    assert len(found[1]) == 200_000


def test_a_call_that_raises_or_is_killed() -> None:
    """The one is a bug, the other may be a library's."""
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        ForkedCall(lambda: 1 / 0).take()

    killed = ForkedCall(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert killed.take() is None
    assert killed.killed_by == signal.SIGKILL


def test_a_call_that_never_ends_keeps_no_descriptor_open() -> None:
    """Until it is closed, which kills it."""
    read, write = os.pipe()
    call = ForkedCall(lambda: time.sleep(3600))
    os.close(write)

    assert os.read(read, 1) == b""
    assert not call.wait(0.0)
    call.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(call.pid, os.WNOHANG)
    os.close(read)
