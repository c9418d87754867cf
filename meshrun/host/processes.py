"""Process trees: subreapers, parent-death signals, and killing what is left over.

The kernel gives every orphan below a subreaper to it, so a subreaper without children has no
descendants at all; ``waitpid`` proves that without a look at the process table (prctl(2)).
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import time
from dataclasses import dataclass

from meshrun.errors import HostError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_GUARD = b"meshrun-guard"
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Signals that do nothing to a process without a handler (signal(7))."""
_KILL_TAKES_S = 10.0
"""How long SIGKILL may take before a process counts as held by the kernel."""
_SHM_MANAGER = b"torch_shm_manag"
"""What /proc calls torch's ``torch_shm_manager``, of programs that share tensors by file.

Two seconds after its last client is gone it frees the shared memory that these left, and ends.
"""
_SHM_MANAGER_TAKES_S = 3.0
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
        os.kill(os.getpid(), signum)


def list_children() -> list[int]:
    """Return the process ids of the direct children of this process.

    Raises:
        HostError: If there is no /proc to find them in.
    """
    if _ON_LINUX:
        try:
            children: list[int] = []
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/children") as file:
                    children.extend(int(pid) for pid in file.read().split())
            return children
        except OSError as error:
            if not os.path.exists("/proc/self"):
                raise HostError(
                    "/proc is not mounted", hint="run `mount -t proc proc /proc`"
                ) from error
            # else a kernel without CONFIG_PROC_CHILDREN
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


def _may_signal(pid: int) -> bool:
    """Whether this user may end a process, as it may not once it runs a setuid program."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


@dataclass(frozen=True, slots=True)
class Ended:
    """What :func:`end_children` found: how many had to be ended, and which could not be."""

    count: int
    survivors: tuple[int, ...] = ()
    """Those that the kernel holds."""
    denied: tuple[int, ...] = ()
    """Those that have become another user's."""

    @property
    def killed(self) -> int:
        """How many of them have ended."""
        return self.count - len(self.survivors)


def end_children(
    *, grace_s: float, deadline_s: float = 0.0, spare: frozenset[int] = frozenset()
) -> Ended:
    """End and reap every descendant of this subreaper: SIGTERM, the grace period, SIGKILL.

    Args:
        grace_s: Seconds between the two signals; 0 for SIGKILL at once.
        deadline_s: Seconds before the first, for helpers that end by themselves with their parent.
        spare: Children that were there before us and are not ours to end.

    Returns:
        How many processes had to be ended, the ids of those that outlived SIGKILL because the
        kernel holds them (state D), and of those that this user may send no signal.
    """
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # to be waited for
    try:
        return _end_children(grace_s, deadline_s, spare)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)


def _end_children(grace_s: float, deadline_s: float, spare: frozenset[int]) -> Ended:
    seen: set[int] = set()
    begin = time.monotonic() + deadline_s
    deadline = begin + grace_s
    turn = _Turn.FIRST
    while children := _reap(spare):
        now = time.monotonic()
        ours = {pid: _turn(pid) for pid in children if _may_signal(pid)}
        if turn is _Turn.FIRST and min(ours.values(), default=turn) is _Turn.SHM_MANAGER:
            turn, begin = _Turn.SHM_MANAGER, max(begin, now + _SHM_MANAGER_TAKES_S)
            deadline = begin + grace_s
        if now >= (deadline + _KILL_TAKES_S if ours else begin):
            return Ended(len(seen), tuple(ours), tuple({*children} - {*ours}))
        if now < begin:
            _wait_for_child(begin - now)
            continue
        for pid in [pid for pid, its_turn in ours.items() if its_turn is min(ours.values())]:
            if now >= deadline:
                send_signal(pid, signal.SIGKILL)
            elif pid not in seen:
                send_signal(pid, signal.SIGTERM)
                send_signal(pid, signal.SIGCONT)
            seen.add(pid)
        _wait_for_child(0.02 if now >= deadline else deadline - now)
    return Ended(len(seen))


class _Turn(enum.IntEnum):
    """Processes that are killed once the others have exited."""

    FIRST = 0
    SHM_MANAGER = 1
    """Frees what the others left, and then ends by itself."""
    GUARD = 2
    """Ends the others should this process be killed meanwhile."""


def _turn(pid: int) -> _Turn:
    return {_SHM_MANAGER: _Turn.SHM_MANAGER, _GUARD: _Turn.GUARD}.get(_name(pid), _Turn.FIRST)


def is_shm_manager(pid: int) -> bool:
    """Whether a process is about to end by itself, once it has freed what others left."""
    return _turn(pid) is _Turn.SHM_MANAGER


def is_guard(pid: int) -> bool:
    """Whether a process ends what is left once the launcher and the zygote have been killed."""
    return _turn(pid) is _Turn.GUARD


def become_guard() -> None:
    """Give this process the name by which :func:`end_children` knows to end it last."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, _GUARD, 0, 0, 0)


def process_name(pid: int) -> str:
    """Return the name of a process as it may be printed, "" if there is no such process."""
    name = _name(pid).decode(errors="replace")
    return "".join(each if each.isprintable() else "?" for each in name)


def _name(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().strip()
    except OSError:
        return b""


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
    """Wait until a child ends or the time has passed."""
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait({signal.SIGCHLD}, timeout_s)
    else:  # macOS
        time.sleep(min(timeout_s, 0.02))


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process descends from another, as of now."""
    import psutil

    try:
        return any(parent.pid == ancestor for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def is_exiting(pid: int) -> bool:
    """Whether a process is at its end, though its parent may not see it yet.

    Source:
        proc_pid_stat(5), field ``flags``; PF_EXITING in the kernel's ``include/linux/sched.h``.
    """
    state, *fields = read_stat(pid)
    return state in ("Z", "X") or (state != "" and bool(int(fields[5]) & _PF_EXITING))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger holds is not."""
    return read_stat(pid)[0] == "T"


def is_foreground(fd: int) -> bool:
    """Whether the shell has given the terminal behind a descriptor to our job, or to our parent's.

    The parent's where we have left its session, as what a launch in Python starts has.

    Source:
        Fields 5, 7 and 8 of ``/proc/PID/stat``, proc(5).
    """
    try:
        return os.tcgetpgrp(fd) in (os.getpgrp(), 0)
    except OSError:  # not our controlling terminal
        stat = read_stat(os.getppid())
    if len(stat) < 6 or not os.isatty(fd) or int(stat[4]) != os.fstat(fd).st_rdev:
        return True  # a terminal without jobs
    return stat[5] == stat[2]


def read_stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; that is "" if there is no such process.

    Source:
        ``/proc/PID/stat``, proc(5): the state is field 3, behind the name, which may have spaces.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""]


class SignalState(enum.Enum):
    """What happened to a signal to a process, according to the kernel."""

    GONE = enum.auto()
    UNHANDLED = enum.auto()
    """The process has no handler for it and does not ignore it: it would end the process."""
    STOPPED = enum.auto()
    PENDING = enum.auto()
    RUNNING = enum.auto()
    """Its handler runs."""
    DONE = enum.auto()
    """None is pending and no handler runs; also before it is sent."""
    UNKNOWN = enum.auto()
    """The kernel does not tell (gVisor)."""


def threads_blocking(pid: int, signum: int) -> frozenset[str]:
    """Return the threads of a process that hold a signal back."""
    bit, found = 1 << (signum - 1), set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            if int(read_status(f"/proc/{pid}/task/{task}/status")["SigBlk"], 16) & bit:
                found.add(task)
    except (OSError, KeyError, ValueError):
        pass
    return frozenset(found)


def signal_state(pid: int, signum: int, blocking: frozenset[str] = frozenset()) -> SignalState:
    """Return where a signal to a process is; DONE only where the handler has returned.

    The kernel blocks a signal in the thread that handles it until the handler returns.

    Args:
        pid: The process.
        signum: The signal.
        blocking: Threads that held it back before it was sent.

    Source:
        proc_pid_status(5): SigCgt, SigIgn, SigBlk, SigPnd and ShdPnd are masks in hexadecimal.
    """
    bit = 1 << (signum - 1)

    def has(status: dict[str, str], mask: str) -> bool:
        return bool(int(status[mask], 16) & bit)

    try:
        status = read_status(f"/proc/{pid}/status")
        tasks = os.listdir(f"/proc/{pid}/task")
        threads = {task: read_status(f"/proc/{pid}/task/{task}/status") for task in tasks}
    except (OSError, ValueError):
        return SignalState.GONE
    found = SignalState.DONE
    if status["State"].startswith(("Z", "X")):
        found = SignalState.GONE
    elif "SigCgt" not in status:
        found = SignalState.UNKNOWN
    elif not has(status, "SigCgt") and not has(status, "SigIgn"):
        found = SignalState.UNHANDLED
    elif status["State"].startswith(("T", "t")):
        found = SignalState.STOPPED
    elif has(status, "ShdPnd") or any(has(thread, "SigPnd") for thread in threads.values()):
        found = SignalState.PENDING
    elif any(has(thread, "SigBlk") for task, thread in threads.items() if task not in blocking):
        found = SignalState.RUNNING
    return found


def handles_signal(pid: int, signum: int) -> bool:
    """Whether a process would live on with a signal: it catches, ignores or holds it back."""
    if signum in _HARMLESS or signal_state(pid, signum) is not SignalState.UNHANDLED:
        return True
    return str(pid) in threads_blocking(pid, signum)  # for sigwait()


def read_status(path: str) -> dict[str, str]:
    """Return the fields of a status in /proc (proc_pid_status(5))."""
    with open(path) as file:
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}


def marked_processes(entry: str) -> list[int]:
    """Return other processes that began with ``entry`` in their environment, as ``NAME=value``.

    A fork shows the environment with which the program of its parent was started (proc(5)).
    """
    found = []
    wanted = os.fsencode(entry)
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:  # it has ended, or is somebody else's
                continue
    return found


def started_at(pid: int) -> str | None:
    """Return when the kernel started a process, in ticks since boot; ``None`` if it has ended.

    Source:
        Field 22 of ``/proc/PID/stat``, proc(5).
    """
    state, *fields = read_stat(pid)
    return fields[18] if state not in ("", "Z", "X") else None


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if there is no such process."""
    _, *fields = read_stat(pid)
    return int(fields[0]) if fields else 0
