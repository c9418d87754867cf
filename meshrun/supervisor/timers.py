"""Timers of ``torch.distributed.elastic.timer``, which kill their rank when they expire.

Ranks write requests to a named pipe: one JSON object per line, in one atomic write.

Source:
    ``FileTimerServer`` in torch 2.13's ``distributed/elastic/timer/file_based_local_timer.py``;
    it runs where ``TORCHELASTIC_ENABLE_FILE_TIMER=1``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from meshrun.errors import HostError
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import read_now
from meshrun.host.process_state import is_below
from meshrun.host.processes import send_signal
from meshrun.host.reactor import Reactor, Timer
from meshrun.protocol.packing import Line, convert, read_json

_ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
_READ_BYTES = 64 * 1024
_MOST_PIDS = 1 << 22
"""The kernel's ``PID_MAX_LIMIT``."""


class _Request(Struct, frozen=True):
    """A timer, as torch requests it."""

    pid: Annotated[int, Meta(gt=0, lt=_MOST_PIDS)]
    scope_id: Line
    expiration_time: Annotated[float, Meta(le=10**12)]
    """Seconds since the epoch, by the rank's clock; negative to cancel the timer."""
    signal: Annotated[int, Meta(lt=signal.NSIG)]


def timer_file(env: Mapping[str, str], run_folder: str) -> str | None:
    """Return the pipe for requests, or ``None`` if timers are not enabled."""
    if env.get(_ENABLED) != "1":
        return None
    return env.get(var.TIMER_FILE) or os.path.join(run_folder, "timers")


class Timers:
    """The pipe, and the timers that are running."""

    def __init__(
        self,
        path: str,
        reactor: Reactor,
        zygote_pid: Callable[[], int],
        note: Callable[[str], None],
    ) -> None:
        """Make the pipe; a timer may kill only descendants of what ``zygote_pid`` returns.

        Raises:
            HostError: If it cannot be created.
        """
        self._path, self._reactor, self._note = path, reactor, note
        self._zygote_pid = zygote_pid
        self._running: dict[tuple[int, str], Timer] = {}
        self._rest = b""
        self._expired: dict[int, _Request] = {}
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
            if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
                os.remove(path)
            os.mkfifo(path, 0o600)
            # Opened for writing too, so that there is no end of file while no rank has it open.
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags)
        except OSError as error:
            raise HostError(f"cannot create the timer pipe `{path}`: {error}") from error
        reactor.add_reader(self._fd, self._read)

    def _read(self) -> None:
        data = read_now(self._fd, _READ_BYTES) or b""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_READ_BYTES]  # longer than any request
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            timer: _Request = convert(_Request, read_json(line))
        except ValueError:
            return  # any process of this user can write to the pipe
        key = timer.pid, timer.scope_id
        if (before := self._running.pop(key, None)) is not None:
            before.cancel()
        if timer.expiration_time >= 0:
            in_s = max(0.0, timer.expiration_time - time.time())
            self._running[key] = self._reactor.call_later(in_s, partial(self._expire, timer))

    def _expire(self, timer: _Request) -> None:
        """Send the timer's signal, if its process is one of the launch."""
        del self._running[timer.pid, timer.scope_id]
        if timer.signal > 0 and is_below(timer.pid, self._zygote_pid()):
            send_signal(timer.pid, timer.signal)
            self._expired[timer.pid] = timer
            self._note(f"killed process {timer.pid}: its timer `{timer.scope_id}` expired")

    def clear(self) -> None:
        """Cancel all timers, whose ranks have exited."""
        for timer in self._running.values():
            timer.cancel()
        self._running.clear()
        self._expired.clear()

    def why_ended(self, pid: int | None, signum: int | None) -> str | None:
        """Return why a signal ended a process, if it came from one of its timers."""
        timer = self._expired.get(pid or 0)
        if timer is None or timer.signal != signum:
            return None
        return f"its timer `{timer.scope_id}` expired"

    def close(self) -> None:
        """Remove the pipe."""
        self._reactor.remove(self._fd)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                os.remove(self._path)
        os.close(self._fd)
