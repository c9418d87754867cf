"""Signal handlers of a program that waits for a launch or a call."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import pytest

from meshrun.api.child_launcher import interrupts, signals_deferred


def test_a_signal_while_handlers_are_restored_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the Ctrl-C that is to end the program."""
    got: list[int] = []
    set_wakeup_fd = signal.set_wakeup_fd

    def interrupted(*args: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return set_wakeup_fd(*args)

    before = signal.signal(signal.SIGUSR1, lambda signum, _: got.append(signum))
    try:
        with signals_deferred():
            monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert got == [signal.SIGUSR1]


def test_ctrl_c_interrupts_a_call_in_asyncio() -> None:
    """asyncio.run() would only cancel its task; a program's own handler is left in place."""

    async def handler() -> object:
        return signal.getsignal(signal.SIGINT)

    assert interrupts(asyncio.run(handler()))
    assert interrupts(signal.default_int_handler)
    assert not interrupts(partial(print, "stopped"))
