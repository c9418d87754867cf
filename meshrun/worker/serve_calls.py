"""A rank that stays: ``python -m meshrun.worker.serve_calls FOLDER MODULE``.

It connects to the program that started it, and hands the channel to ``serve`` of the module; that
of this one makes the calls that come, until the program has no more.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

# Nothing that is not loaded yet is imported here: the caller's sys.path comes first.
from meshrun.worker.function import restore_path

if TYPE_CHECKING:
    from meshrun.worker.call_channel import Channel


def run(folder: str, module: str) -> None:
    """Connect, say which rank this is, and serve."""
    restore_path(folder)
    import pickle
    from importlib import import_module

    from meshrun.layout.labels import rank_label
    from meshrun.mesh.current_layout import current_layout
    from meshrun.worker.call_channel import connect_in

    own, layout = os.getpid(), current_layout()
    rank = int(os.environ["RANK"])
    channel = connect_in(folder)
    channel.send(pickle.dumps((rank, layout.world_size, own, rank_label(layout, rank))))
    import_module(module).serve(channel)
    if os.getpid() != own:  # a child that a call has forked, and that returned from it
        os._exit(0)


def serve(channel: Channel) -> None:
    """Make the calls that come, until there are no more.

    A call is pickled: (function, args, kwargs). So is the answer: (the pickled value, or ``None``
    if the call raised; the text of its traceback; the pickled exception, or ``None``).
    """
    from itertools import count

    from meshrun.worker.call_channel import end_of_output

    own = os.getpid()
    for number in count():
        try:
            call = channel.receive()
        except EOFError:
            return
        answer = _make(call)
        if os.getpid() != own:
            return
        for stream in (sys.stdout, sys.stderr):
            print(f"{end_of_output(number)}{os.environ['RANK']}", file=stream, flush=True)
        channel.send(answer)


def _make(call: bytes) -> bytes:
    import pickle

    import cloudpickle

    from meshrun.worker.program import format_raised

    try:
        function, args, kwargs = pickle.loads(call)  # noqa: S301 - our caller's
        return pickle.dumps((cloudpickle.dumps(function(*args, **kwargs)), "", None))
    except BaseException as error:  # also what is meant to end a program
        text = format_raised(error).text
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = None
        return pickle.dumps((None, text, pickled))


if __name__ == "__main__":
    _module = sys.argv.pop()
    run(sys.argv.pop(), _module)
