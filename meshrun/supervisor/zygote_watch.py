"""Notes that the zygote cannot run, so that a launch waits for it."""

from __future__ import annotations

from collections.abc import Callable

from meshrun.host.processes import read_stat
from meshrun.host.reactor import Reactor

_LOOK_EVERY_S = 3.0
_CPU_TIMES = slice(11, 13)
"""The fields utime and stime of ``/proc/PID/stat``, from the state on (proc_pid_stat(5))."""


class ZygoteWatch:
    """Looks at the zygote's state now and then, and notes once if it stays stopped or held.

    Args:
        pid: Returns the id of the zygote's process.
        where: Says on which host it is, if there are several.
    """

    def __init__(
        self, pid: Callable[[], int], reactor: Reactor, note: Callable[[str], None], where: str
    ) -> None:
        self._pid, self._note, self._where = pid, note, where
        self._seen = self._noted = (0, "", [""])
        reactor.every(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        pid = self._pid()
        state, *fields = read_stat(pid)
        before, self._seen = self._seen, (pid, state, fields[_CPU_TIMES])
        if state not in ("T", "D") or before != self._seen or self._noted == self._seen:
            return
        self._noted = self._seen
        who = f"the process that starts the ranks{self._where} (process {pid})"
        if state == "T":
            self._note(f"{who} is stopped; the launch waits for it until `kill -CONT {pid}`")
        else:
            self._note(
                f"waiting for {who}, which waits for a disk, a driver or a network file system"
                " (state D in `ps`)"
            )
