"""Which login session a process belongs to."""

from __future__ import annotations

import os

from meshrun.host.processes import parent_of


def leader_of_session(pid: int) -> int:
    """Return the shell, or whatever leads the session that a process was started from; 0 if none.

    A process that leads its own, as what ``launch()`` starts, was started from its parent's.
    """
    try:
        while pid > 1:
            if (leader := os.getsid(pid)) not in (0, pid):
                return leader
            pid = parent_of(pid)
    except OSError:  # it has ended
        pass
    return 0
