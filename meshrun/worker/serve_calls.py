"""A rank that serves calls: ``python -m meshrun.worker.serve_calls FOLDER MODULE``.

It connects to the program that started it, and passes the channel to the module's ``serve``. The
``serve`` of this module makes the calls it receives until the program ends the connection. If the
variable ``MESHRUN_SERVE`` names the folder, a rank serves calls instead of running its program,
and one of the calls may run it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

# Nothing that is not loaded yet is imported here: the caller's sys.path comes first.
from meshrun.host import rank_variables as var
from meshrun.host.own_variables import SERVE
from meshrun.worker.function import restore_path, unpicklable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from meshrun.worker.call_channel import CallDone, Channel

PROGRAM = "meshrun.worker.serve_calls"
"""This module, as the program of a launch."""
_programs: list[Callable[[], None]] = []
"""The function that runs this rank's own program."""


def run_own_program() -> None:
    """Run the program of this rank, which serves calls instead."""
    _programs[0]()


def serve_instead(program: Callable[[], None]) -> None:
    """Serve the caller's calls, one of which may run the program."""
    _programs[:] = [program]
    _connect_and_serve(os.environ.pop(SERVE), __name__)


def run(folder: str, module: str) -> None:
    """Serve calls with the caller's ``sys.path`` and a new ``__main__``."""
    from meshrun.worker import cells, pickling  # noqa: F401 - while the library is searched first

    restore_path(folder)
    import builtins
    from types import ModuleType

    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.argv[:] = [""]
    _connect_and_serve(folder, module)


def _connect_and_serve(folder: str, module: str) -> None:
    from importlib import import_module

    from meshrun.layout.labels import rank_label
    from meshrun.mesh.current_layout import current_layout
    from meshrun.worker.call_channel import connect_in

    own, layout = os.getpid(), current_layout()
    rank = var.own_rank()
    channel = connect_in(folder)
    channel.send((rank, layout.world_size, own, rank_label(layout, rank)))
    import_module(module).serve(channel)
    if os.getpid() != own:  # a child that a call forked and that returned from the call
        os._exit(0)


def serve(channel: Channel) -> None:
    """Make the calls that arrive on ``channel`` until it ends.

    A call is a pickled tuple: (function, args, kwargs).
    """
    from contextlib import suppress
    from itertools import count

    from meshrun.mesh.to_launcher import to_launcher
    from meshrun.worker.debuggers import RankTerminal

    own, calls, terminal = os.getpid(), _Calls(channel), RankTerminal(channel)
    for number in count():
        try:
            call = channel.receive()
        except EOFError:
            return
        answer = calls.make(call)
        if os.getpid() != own:
            return
        terminal.release()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the call closed or replaced it
                stream.flush()
        if to_launcher.end_call is not None:
            to_launcher.end_call(number)
        with suppress(OSError):  # the caller is gone, or no longer waits
            channel.send(answer)


class _Calls:
    """Makes calls. The first SIGINT during a call interrupts it; any other does nothing."""

    def __init__(self, channel: Channel) -> None:
        import signal

        self._channel = channel
        self._is_in_call = self._takes_interrupt = False
        self._interrupt = signal.default_int_handler
        self._show_unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)

    def make(self, call: bytes) -> CallDone:
        """Make a call and return the answer."""
        import pickle

        from msgspec.structs import asdict

        from meshrun.protocol.rank_end import RankRaised, headline
        from meshrun.worker.call_channel import CallDone
        from meshrun.worker.pickling import dumps, pickle_error
        from meshrun.worker.program import format_raised

        try:
            self._is_in_call = True
            self._take_interrupt()
            function, args, kwargs = pickle.loads(call)  # noqa: S301 - our caller's
            value = function(*args, **kwargs)
            try:
                pickled = dumps(value)
            except Exception as error:
                raise unpicklable(value, var.own_rank(), error) from None
            self._is_in_call = self._takes_interrupt = False
            return CallDone(pickled)
        except BaseException as error:  # even one that would end a program
            self._is_in_call = self._takes_interrupt = False
            raised = RankRaised(rank=0, at_ns=0, shown=False, **asdict(format_raised(error)))
            return CallDone(None, raised.traceback, pickle_error(error), headline(raised))

    def _take_interrupt(self) -> None:
        from meshrun.worker.call_channel import CallBegun

        self._takes_interrupt = True
        self._channel.send(CallBegun())

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._takes_interrupt:
            self._takes_interrupt = False
            self._interrupt(signum, frame)

    def _on_unraisable(self, ignored: sys.UnraisableHookArgs) -> None:
        """Take another SIGINT if Python drops the exception of this one, as in ``__del__``."""
        if self._is_in_call and isinstance(ignored.exc_value, KeyboardInterrupt):
            self._take_interrupt()
        else:
            self._show_unraisable(ignored)


if __name__ == "__main__":
    _module = sys.argv.pop()
    run(sys.argv.pop(), _module)
