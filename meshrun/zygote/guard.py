"""The last guard: kills what is left of a launch whose launcher and zygote were both killed.

Either of the two ends everything after the other's end, as every orphan comes to it. Without both,
the kernel ends the ranks, and what they started goes to init. The store's process, which has little
else to do, then ends whatever carries the launch's mark in the environment it began with.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress
from typing import NoReturn

from meshrun.host.leftovers import remove_if_stale
from meshrun.host.processes import (
    become_guard,
    die_with_parent,
    is_shm_manager,
    marked_processes,
    send_signal,
)
from meshrun.zygote.control import maker_of

LAUNCH_MARK = "MESHRUN_LAUNCH_MARK"
"""Set for everything that a launch starts, to a random value by which leftovers are found."""

_SWEEP_TAKES_S = 10.0
_BETWEEN_S = 0.02
_CLEAN_LOOKS = 12
"""One that executes a program has no environment to be seen for a moment, longer if busy."""


class Guard:
    """Made in the zygote, so that it knows the launcher; runs in the store's process."""

    def __init__(self, scratch_dir: str, control: socket.socket) -> None:
        self._scratch_dir = scratch_dir
        self._mark = os.environ.get(LAUNCH_MARK, "")
        self._launcher = _launcher_behind(control)

    def begin(self, zygote: int) -> None:
        """In the store's process, first of all: be woken by the zygote's end, or end with it."""
        become_guard()
        self._zygote = -1
        if self._launcher >= 0 and self._mark:
            self._zygote = _process_fd(zygote)
        die_with_parent(zygote, signal.SIGKILL if self._zygote < 0 else signal.SIGCONT)

    def stand(self) -> NoReturn:
        """Wait until zygote and launcher are dead and kill what is left; the launcher ends us."""
        if self._zygote < 0:
            while True:
                signal.pause()
        _wait_for_end(self._launcher)
        with suppress(OSError):  # of a keeper's that is stopped too, the kernel wakes none
            signal.pidfd_send_signal(self._zygote, signal.SIGCONT)
        _wait_for_end(self._zygote)
        end_marked(self._mark)
        self.remove_scratch()
        os._exit(0)

    def remove_scratch(self) -> None:
        """Remove what the launcher could not, once it has released it."""
        if self._scratch_dir:
            _wait_for_end(self._launcher)
            remove_if_stale(self._scratch_dir)


def _launcher_behind(control: socket.socket) -> int:
    """Return a descriptor of the launcher, which made this pair of sockets; -1 if it is dead."""
    pid = maker_of(control)
    process = _process_fd(pid) if pid else -1
    poll = select.poll()
    poll.register(control, 0)
    if process >= 0 and poll.poll(0):  # hung up, so the id may be another's by now
        os.close(process)
        return -1
    return process


def _process_fd(pid: int) -> int:
    """Return a descriptor that reads as ready once a process has ended; -1 where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # macOS, an old kernel
        return -1


def _wait_for_end(process: int) -> None:
    if process >= 0:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()


def end_marked(mark: str) -> None:
    """End all that carry a launch's mark, until many looks find none: one may fork meanwhile."""
    deadline = time.monotonic() + _SWEEP_TAKES_S
    clean = 0
    while clean < _CLEAN_LOOKS and time.monotonic() < deadline:
        marked = marked_processes(f"{LAUNCH_MARK}={mark}")
        found = [pid for pid in marked if not is_shm_manager(pid)]
        clean = 0 if found else clean + 1
        for pid in found:
            send_signal(pid, signal.SIGKILL)
        time.sleep(_BETWEEN_S)
