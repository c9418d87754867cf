"""Timers of ``torch.distributed.elastic.timer``: one that expires kills its rank.

Ranks write requests to a named pipe, one JSON object a line, each in one atomic write.

Source:
    ``FileTimerServer`` in torch 2.13's ``distributed/elastic/timer/file_based_local_timer.py``;
    it runs where ``TORCHELASTIC_ENABLE_FILE_TIMER=1``.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshrun.errors import HostError
from meshrun.host.processes import is_below, send_signal

_ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
_FILE = "TORCHELASTIC_TIMER_FILE"
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Timer:
    pid: int
    scope: str
    expires_s: float
    """Seconds since the epoch, as the rank's clock has it."""
    signum: int


def timer_file(env: Mapping[str, str], run_folder: str) -> str | None:
    """Return where timers are asked for, or ``None`` if they are not wanted."""
    if env.get(_ENABLED) != "1":
        return None
    return env.get(_FILE) or os.path.join(run_folder, "timers")


class Timers:
    """The pipe and the timers that are running."""

    def __init__(self, path: str) -> None:
        """Make the pipe.

        Raises:
            HostError: If it cannot be made.
        """
        self._path = path
        self._running: dict[tuple[int, str], _Timer] = {}
        self._rest = b""
        self._expired: dict[int, _Timer] = {}
        """By process."""
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
            if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
                os.remove(path)
            os.mkfifo(path, 0o600)
            # For writing too, so that the pipe never ends while no rank has it open.
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags)
        except OSError as error:
            raise HostError(f"cannot create the timer pipe `{path}`: {error}") from error

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._fd

    def read(self) -> None:
        """Take the requests that have come."""
        try:
            data = self._rest + os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            timer = _Timer(
                int(request["pid"]),
                str(request["scope_id"]),
                float(request["expiration_time"]),
                int(request["signal"]),
            )
        except (ValueError, KeyError, TypeError):
            return  # anybody of this user may write to the pipe
        if timer.expires_s < 0:
            self._running.pop((timer.pid, timer.scope), None)
        else:
            self._running[timer.pid, timer.scope] = timer

    @property
    def next_look_ns(self) -> int | None:
        """Monotonic time of the next expiry, or ``None``."""
        if not self._running:
            return None
        in_s = min(timer.expires_s for timer in self._running.values()) - time.time()
        return time.monotonic_ns() + int(max(0.0, in_s) * 1e9)

    def expire(self, zygote_pid: int) -> list[str]:
        """Send expired timers' signals to our own processes; return a line to print for each."""
        now_s = time.time()
        told = []
        for timer in [timer for timer in self._running.values() if timer.expires_s <= now_s]:
            del self._running[timer.pid, timer.scope]
            if timer.signum > 0 and is_below(timer.pid, zygote_pid):
                send_signal(timer.pid, timer.signum)
                self._expired[timer.pid] = timer
                told.append(f"killed process {timer.pid}: its timer `{timer.scope}` expired")
        return told

    def skip(self, lost_ns: int) -> None:
        """Do not count this time."""
        self._running = {
            key: replace(timer, expires_s=timer.expires_s + lost_ns / 1e9)
            for key, timer in self._running.items()
        }

    def clear(self) -> None:
        """Forget all timers: their ranks have exited."""
        self._running.clear()
        self._expired.clear()

    def why_ended(self, pid: int | None, signum: int | None) -> str | None:
        """Return why a signal ended a process, if one of its timers did that."""
        timer = self._expired.get(pid or 0)
        if timer is None or timer.signum != signum:
            return None
        return f"its timer `{timer.scope}` expired"

    def close(self) -> None:
        """Remove the pipe."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                os.remove(self._path)
        os.close(self._fd)
