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

from msgspec import Struct

from meshrun.errors import HostError
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import read_now
from meshrun.host.printable import one_line
from meshrun.host.process_state import is_below
from meshrun.host.processes import send_signal
from meshrun.host.reactor import Reactor
from meshrun.host.reactor import Timer as Alarm
from meshrun.protocol.packing import read_json

_ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
_READ_BYTES = 64 * 1024
_MOST_PIDS = 1 << 22
"""The kernel's ``PID_MAX_LIMIT``."""


class _Timer(Struct, frozen=True):
    pid: int
    scope: str
    expires_s: float
    """Seconds since the epoch, by the rank's clock."""
    signum: int


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
        self._running: dict[tuple[int, str], Alarm] = {}
        self._rest = b""
        self._expired: dict[int, _Timer] = {}
        """Expired timers by process id."""
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
            request = read_json(line)
            timer = _Timer(
                int(request["pid"]),
                one_line(str(request["scope_id"])),
                float(request["expiration_time"]),
                int(request["signal"]),
            )
            in_ns = int(max(0.0, timer.expires_s - time.time()) * 1e9)
        except (ValueError, OverflowError, KeyError, TypeError):
            return  # any process of this user can write to the pipe
        if not (0 < timer.pid < _MOST_PIDS and timer.signum < signal.NSIG):
            return
        if (before := self._running.pop((timer.pid, timer.scope), None)) is not None:
            before.cancel()
        if timer.expires_s >= 0:
            at_ns = self._reactor.now_ns() + in_ns
            alarm = self._reactor.call_at(at_ns, partial(self._expire, timer))
            self._running[timer.pid, timer.scope] = alarm

    def _expire(self, timer: _Timer) -> None:
        """Send the timer's signal, if its process is one of the launch."""
        del self._running[timer.pid, timer.scope]
        if timer.signum > 0 and is_below(timer.pid, self._zygote_pid()):
            send_signal(timer.pid, timer.signum)
            self._expired[timer.pid] = timer
            self._note(f"killed process {timer.pid}: its timer `{timer.scope}` expired")

    def clear(self) -> None:
        """Cancel all timers, whose ranks have exited."""
        for alarm in self._running.values():
            alarm.cancel()
        self._running.clear()
        self._expired.clear()

    def why_ended(self, pid: int | None, signum: int | None) -> str | None:
        """Return why a signal ended a process, if it came from one of its timers."""
        timer = self._expired.get(pid or 0)
        if timer is None or timer.signum != signum:
            return None
        return f"its timer `{timer.scope}` expired"

    def close(self) -> None:
        """Remove the pipe."""
        self._reactor.remove(self._fd)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                os.remove(self._path)
        os.close(self._fd)
