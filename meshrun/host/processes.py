"""Whose child is whose: subreapers, parent-death signals, and the end of what is left over.

The kernel gives every orphan below a subreaper to it, so a subreaper without children has no
descendants at all; ``waitpid`` proves that without a look at the process table (prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TAKES_S = 10.0
"""How long SIGKILL may take before a process counts as held by the kernel."""
_ON_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None, use_errno=True) if _ON_LINUX else None


def become_subreaper() -> bool:
    """Adopt orphans among our descendants; ``False`` where the system cannot (macOS)."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends.

    A parent that ended before this call would go unnoticed, so it is checked once after it.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def list_children() -> list[int]:
    """Return the process ids of the direct children of this process."""
    if _ON_LINUX:
        try:
            children: list[int] = []
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/children") as file:
                    children.extend(int(pid) for pid in file.read().split())
            return children
        except OSError:  # a kernel without CONFIG_PROC_CHILDREN
            pass
    import psutil

    return [child.pid for child in psutil.Process().children()]


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process that may have ended already."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def send_signal_to_group(pid: int, signum: int) -> None:
    """Send a signal to the process group that ``pid`` leads, if it still does."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


@dataclass(frozen=True, slots=True)
class Ended:
    """What :func:`end_children` found: how many had to be ended, and which could not be."""

    count: int
    survivors: tuple[int, ...]


def end_children(
    *, grace_s: float, patience_s: float = 0.0, spare: frozenset[int] = frozenset()
) -> Ended:
    """End and reap every descendant of this subreaper: SIGTERM, the grace period, SIGKILL.

    Args:
        grace_s: Seconds between the two signals; 0 for SIGKILL at once.
        patience_s: Seconds before the first, for helpers that end by themselves with their parent.
        spare: Children that were there before us and are not ours to end.

    Returns:
        How many processes had to be ended, and the ids of those that outlived SIGKILL because
        the kernel holds them (state D).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # so that it can be waited for
    seen: set[int] = set()
    begin = time.monotonic() + patience_s
    deadline = begin + grace_s
    while children := _reap(spare):
        now = time.monotonic()
        if now >= deadline + _KILL_TAKES_S:
            return Ended(len(seen), tuple(children))
        if now < begin:
            _wait_for_child(begin - now)
            continue
        for pid in children:
            if now >= deadline:
                send_signal(pid, signal.SIGKILL)
            elif pid not in seen:
                send_signal(pid, signal.SIGTERM)
                send_signal(pid, signal.SIGCONT)
            seen.add(pid)
        _wait_for_child(0.02 if now >= deadline else deadline - now)
    return Ended(len(seen), ())


def _reap(spare: frozenset[int]) -> list[int]:
    """Reap what has ended and return the children that are still alive."""
    if not _has_children():
        return []
    alive = []
    for pid in list_children():
        if pid in spare:
            continue
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                alive.append(pid)
        except ChildProcessError:
            continue
    return alive


def _has_children() -> bool:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _wait_for_child(timeout_s: float) -> None:
    """Wait until a child ends or the time is over."""
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait({signal.SIGCHLD}, timeout_s)
    else:  # macOS
        time.sleep(min(timeout_s, 0.02))


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process descends from another, as far as can be seen now."""
    import psutil

    try:
        return any(parent.pid == ancestor for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False
