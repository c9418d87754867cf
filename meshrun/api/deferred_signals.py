"""Signal handlers of a program that calls us. They may raise, so they wait for a safe moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshrun.host.reactor import Reactor
from meshrun.supervisor.signals import SignalQueue


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
