"""The last guard: kills what is left of a launch whose launcher and zygote were both killed.

If only one of the two is killed, the other adopts all orphans and kills them. If both are, the
kernel kills the ranks, but init adopts what they started. The store process, which has little else
to do, then kills every process that was started with the launch's mark in its environment.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import NoReturn

from meshrun.host.folder import remove_if_stale
from meshrun.host.own_variables import LAUNCH_MARK
from meshrun.host.process_state import is_stopped, marked_processes, parent_of, started_at
from meshrun.host.processes import (
    become_guard,
    become_subreaper,
    die_with_parent,
    frees_memory,
    send_signal,
)
from meshrun.host.reactor import Steps, finish
from meshrun.zygote.control import is_hung_up, launcher_pid

_CHECK_LAUNCHER_EVERY_S = 1.0
_SWEEP_TAKES_S = 10.0
_BETWEEN_SCANS_S = 0.02
_CLEAN_SCANS = 12
"""A process in ``execve`` shows no environment for a moment, longer on a busy machine."""


class Guard:
    """Created in the zygote, which knows the launcher; runs in the store process."""

    def __init__(self, scratch_dir: str, control: socket.socket) -> None:
        self._scratch_dir = scratch_dir
        self._mark = os.environ.get(LAUNCH_MARK, "")
        self._launcher = launcher_pid(control)
        self._launcher_born = started_at(self._launcher)
        if is_hung_up(control):  # it is dead, and another process may have the id by now
            self._launcher_born = None
        self._launchers_parent = parent_of(self._launcher)
        self._zygote = 0

    def begin(self, zygote: int) -> None:
        """Have the kernel wake this process when the zygote ends, or kill it if it cannot guard."""
        become_guard()
        if self._launcher_born is None or not self._mark:
            die_with_parent(zygote)
            return
        self._zygote = zygote
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})  # for sigtimedwait()
        die_with_parent(zygote, signal.SIGCONT)

    def run(self) -> NoReturn:
        """Wait until launcher and zygote are dead, then kill what is left.

        In an ordinary launch, the zygote kills this process first.
        """
        if not self._zygote:
            while True:
                signal.pause()
        while os.getppid() == self._zygote:
            if not self._launcher_lives():  # wake it even if its parent is a shim, stopped too
                send_signal(self._zygote, signal.SIGCONT)
            self._wake_orphaned_launcher()
            signal.sigtimedwait({signal.SIGCONT}, _CHECK_LAUNCHER_EVERY_S)
        self._wait_for_launcher()
        finish(killing_marked(self._mark))
        self.remove_scratch()
        os._exit(0)

    def kill_orphans(self) -> None:
        """Kill what ranks left behind, if the zygote has not adopted it."""
        finish(killing_orphans(self._mark))

    def remove_scratch(self) -> None:
        """Remove the launcher's temporary folder once the launcher is dead."""
        if self._scratch_dir:
            self._wait_for_launcher()
            remove_if_stale(self._scratch_dir)

    def _wake_orphaned_launcher(self) -> None:
        """Continue a launcher whose parent has ended while it was stopped, as it is to end too."""
        parent = parent_of(self._launcher)
        if parent != self._launchers_parent and is_stopped(self._launcher):
            send_signal(self._launcher, signal.SIGCONT)
        self._launchers_parent = parent

    def _wait_for_launcher(self) -> None:
        # It is no child of ours, and not every system has a descriptor for its end.
        while self._launcher_lives():
            time.sleep(_BETWEEN_SCANS_S)

    def _launcher_lives(self) -> bool:
        return self._launcher_born is not None and (
            started_at(self._launcher) == self._launcher_born
        )


def killing_orphans(mark: str) -> Steps[None]:
    """Kill all processes with a launch's mark where none adopts orphans (gVisor, macOS)."""
    if mark and not become_subreaper():
        yield from killing_marked(mark)


def killing_marked(mark: str) -> Steps[None]:
    """Kill all processes with a launch's mark, until several scans in a row find none."""
    deadline = time.monotonic() + _SWEEP_TAKES_S
    clean = 0
    while clean < _CLEAN_SCANS and time.monotonic() < deadline:
        marked = marked_processes(f"{LAUNCH_MARK}={mark}")
        found = [pid for pid in marked if not frees_memory(pid)]
        clean = 0 if found else clean + 1
        for pid in found:
            send_signal(pid, signal.SIGKILL)
        yield _BETWEEN_SCANS_S
