"""Process trees: subreapers, parent-death signals, and killing leftover processes.

Every orphan below a subreaper becomes its child, so a subreaper without children has no descendants
at all; ``waitpid`` proves that without reading the process table (prctl(2)).
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from msgspec import Struct

from meshrun.errors import HostError
from meshrun.host.printable import one_line
from meshrun.host.reactor import Steps, finish

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PTRACE_DETACH = 17
_GUARD = b"meshrun-guard"
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_RUNNING = ("R", "S", "D")
"""States in /proc of a process that is neither stopped, traced nor over."""
_STOPS_IN_S = 1.0
_HARMLESS = frozenset({signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})
"""Signals that do nothing to a process without a handler (signal(7))."""
_KILL_TAKES_S = 10.0
"""How long SIGKILL may take before a process counts as held by the kernel."""
_SHM_MANAGER = b"torch_shm_manag"
"""Name in /proc of ``torch_shm_manager``, which torch starts to share tensors by file.

Two seconds after its last client has exited, it frees the shared memory they left, and exits.
"""
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
"""In the command line of the interpreter that Python starts with the first shared memory.

It frees what is left of it as soon as the processes that use it have ended, and exits.
"""
_INTERPRETER = os.fsencode(os.path.basename(sys.executable or ""))[:15]
"""Its name in /proc."""
_FREEING_TAKES_S = 3.0
_ON_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None, use_errno=True) if _ON_LINUX else None


def become_subreaper() -> bool:
    """Adopt orphaned descendants; return ``False`` if the system cannot (macOS)."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send ``signum`` to this process when its parent ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), signum)


def release_traced(pid: int, signum: int) -> None:
    """Let a child go on that is stopped because it asked its parent to trace it (ptrace(2)).

    ``waitpid`` returns such a child without having been asked for stopped ones.
    """
    if _LIBC is not None:
        _LIBC.ptrace(_PTRACE_DETACH, pid, None, ctypes.c_long(signum))


def list_children() -> list[int]:
    """Return the process ids of the direct children of this process.

    Raises:
        HostError: If /proc is not mounted.
    """
    if _ON_LINUX:
        try:
            children: list[int] = []
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
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


@contextmanager
def signals_blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals during the block, so that a fork in it gets none while it has our handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupts_delayed() -> AbstractContextManager[None]:
    """Delay SIGINT to a launcher that the block starts until its ``main()``.

    Python would print a traceback and exit with 1 while it starts.
    """
    return signals_blocked({signal.SIGINT})


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def send_signal_to_main_thread(pid: int, signum: int) -> None:
    """Send a signal to the main thread of a process.

    A signal to the process goes to another thread if the main one has a signal pending and waits
    for a core (``wants_signal`` in the kernel's ``kernel/signal.c``).
    """
    tgkill = getattr(_LIBC, "tgkill", None)  # since glibc 2.30
    if tgkill is None:
        send_signal(pid, signum)
    else:
        tgkill(pid, pid, signum)


def send_signal_to_group(pid: int, signum: int) -> None:
    """Send a signal to the process group that ``pid`` leads, if it still does."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def _may_signal(pid: int) -> bool:
    """Return whether this user may signal a process, unlike one that runs a setuid program."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


class EndedChildren(Struct, frozen=True):
    """The result of :func:`end_children`."""

    count: int
    """Number of processes that had to be ended."""
    survivors: tuple[int, ...] = ()
    """Processes that survived SIGKILL because the kernel holds them (state D)."""
    denied: tuple[int, ...] = ()
    """Processes that this user may not signal, as they have become another user's."""

    @property
    def killed(self) -> int:
        """Number of processes that were ended successfully."""
        return self.count - len(self.survivors)


def end_children(
    *, grace_s: float, delay_s: float = 0.0, spare: frozenset[int] = frozenset()
) -> EndedChildren:
    """End and reap every descendant of this subreaper: SIGTERM, the grace period, SIGKILL.

    Args:
        grace_s: Seconds between the two signals; 0 for SIGKILL at once.
        delay_s: Seconds before the first signal, for helpers that exit with their parent.
        spare: Children that existed before us, and are not ours to end.
    """
    with signals_blocked({signal.SIGCHLD}):  # for sigtimedwait()
        return finish(_ending_children(grace_s, delay_s, lambda: spare), _wait_for_child)


def killing_children(spares: Callable[[], frozenset[int]]) -> Steps[EndedChildren]:
    """As :func:`end_children` with SIGKILL at once, in steps; ``spares`` is asked in each."""
    return _ending_children(0.0, 0.0, spares)


def _ending_children(
    grace_s: float, delay_s: float, spares: Callable[[], frozenset[int]]
) -> Steps[EndedChildren]:
    seen: set[int] = set()
    term_at = time.monotonic() + delay_s
    kill_at = term_at + grace_s
    has_waited = False
    while children := _reap(spares()):
        now = time.monotonic()
        turns = {pid: _turn(pid) for pid in children if _may_signal(pid)}
        turn = min(turns.values(), default=_Turn.FIRST)
        if turn is _Turn.FREES_MEMORY and not has_waited:
            has_waited, term_at = True, max(term_at, now + _FREEING_TAKES_S)
            kill_at = term_at + grace_s
        if now >= (kill_at + _KILL_TAKES_S if turns else term_at):
            for pid in turns.keys() - seen:  # whose turn has not come, such as a guard's
                send_signal(pid, signal.SIGKILL)
            survivors = tuple(pid for pid in turns if pid in seen)
            return EndedChildren(len(seen), survivors, tuple({*children} - {*turns}))
        if now < term_at:
            yield term_at - now
            continue
        for pid in [pid for pid, its_turn in turns.items() if its_turn is turn]:
            if now >= kill_at:
                send_signal(pid, signal.SIGKILL)
            elif pid not in seen:
                send_signal(pid, signal.SIGTERM)
                send_signal(pid, signal.SIGCONT)
            seen.add(pid)
        yield 0.02 if now >= kill_at else kill_at - now
    return EndedChildren(len(seen))


class _Turn(enum.IntEnum):
    """The order in which processes are ended, each group after the one before has exited."""

    FIRST = 0
    FREES_MEMORY = 1
    """Frees the shared memory of the others, and then exits by itself."""
    GUARD = 2
    """Ends the others if this process is killed in the meantime."""


def _turn(pid: int) -> _Turn:
    name = _name(pid)
    if name == _GUARD:
        return _Turn.GUARD
    # The kernel may hold a process so that reading its command line would not return.
    is_tracker = name == _INTERPRETER and _RESOURCE_TRACKER in _read(pid, "cmdline")
    return _Turn.FREES_MEMORY if is_tracker or name == _SHM_MANAGER else _Turn.FIRST


def frees_memory(pid: int) -> bool:
    """Return whether a process frees the shared memory of others, and then exits by itself."""
    return _turn(pid) is _Turn.FREES_MEMORY


def is_guard(pid: int) -> bool:
    """Return whether a process ends leftovers if the launcher and the zygote have been killed."""
    return _turn(pid) is _Turn.GUARD


def become_guard() -> None:
    """Give this process the name that makes :func:`end_children` end it last."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, _GUARD, 0, 0, 0)


def process_name(pid: int) -> str:
    """Return the printable name of a process, "" if there is no such process."""
    return one_line(_name(pid).decode(errors="replace"))


def _name(pid: int) -> bytes:
    return _read(pid, "comm").strip()


def _read(pid: int, file: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{file}", "rb") as opened:
            return opened.read()
    except OSError:
        return b""


def _reap(spare: frozenset[int]) -> list[int]:
    """Reap children that have ended, and return those that are still alive."""
    if not _has_children():
        return []
    alive = []
    for pid in list_children():
        if pid in spare:
            continue
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0 or os.WIFSTOPPED(status):  # the latter is one that asked to be traced
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
    """Return whether a process is currently a descendant of another."""
    import psutil

    try:
        return any(parent.pid == ancestor for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def is_exiting(pid: int) -> bool:
    """Return whether a process is exiting, even if its parent cannot reap it yet.

    Source:
        proc_pid_stat(5), field ``flags``; PF_EXITING in the kernel's ``include/linux/sched.h``.
    """
    state, *fields = read_stat(pid)
    return state in ("Z", "X") or (state != "" and bool(int(fields[5]) & _PF_EXITING))


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, not by a debugger."""
    return read_stat(pid)[0] == "T"


def is_traced(pid: int) -> bool:
    """Return whether a debugger has stopped a process."""
    return read_stat(pid)[0] == "t"


def wait_until_stopped(pids: Iterable[int]) -> None:
    """Wait until processes that are being stopped no longer run, but at most for a second."""
    deadline = time.monotonic() + _STOPS_IN_S
    for pid in pids:
        while read_stat(pid)[0] in _RUNNING and time.monotonic() < deadline:
            time.sleep(0.002)  # the kernel notifies only parents


def is_foreground(fd: int) -> bool:
    """Return whether our job, or our parent's, is in the foreground of a terminal.

    The parent's counts if we have left its session, like a launch started from Python.

    Source:
        Fields 5, 7 and 8 of ``/proc/PID/stat``, proc(5).
    """
    try:
        return os.tcgetpgrp(fd) in (os.getpgrp(), 0)
    except OSError:  # not our controlling terminal
        stat = read_stat(os.getppid())
    if len(stat) < 6 or not os.isatty(fd) or int(stat[4]) != os.fstat(fd).st_rdev:
        return True  # a terminal without job control
    return stat[5] == stat[2]


def read_stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; ``[""]`` if there is no such process.

    Source:
        ``/proc/PID/stat``, proc(5): the state is field 3, after the name, which may have spaces.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""]


class SignalState(enum.Enum):
    """The state of a signal to a process, according to the kernel."""

    GONE = enum.auto()
    UNHANDLED = enum.auto()
    """The process neither handles nor ignores the signal, so it would end the process."""
    STOPPED = enum.auto()
    TRACED = enum.auto()
    """A debugger has stopped the process."""
    PENDING = enum.auto()
    RUNNING = enum.auto()
    """The handler is running."""
    DONE = enum.auto()
    """The signal is not pending and no handler is running; also before it is sent."""
    UNKNOWN = enum.auto()
    """The kernel does not report it (gVisor, macOS)."""


def threads_blocking(pid: int, signum: int) -> frozenset[str]:
    """Return the threads of a process that block a signal."""
    try:
        threads = _read_threads(pid)
        return frozenset(task for task in threads if _has(threads[task], "SigBlk", signum))
    except (OSError, KeyError, ValueError):
        return frozenset()


def signal_state(pid: int, signum: int, blocking: frozenset[str] = frozenset()) -> SignalState:
    """Return the state of a signal to a process; DONE only once its handler has returned.

    The kernel blocks a signal in the thread that handles it until the handler returns.

    ``blocking`` are the threads that blocked it before it was sent.

    Source:
        proc_pid_status(5): SigCgt, SigIgn, SigBlk, SigPnd and ShdPnd are masks in hexadecimal.
    """
    if not _ON_LINUX:
        return SignalState.UNKNOWN
    try:
        status, threads = read_status(f"/proc/{pid}/status"), _read_threads(pid)
    except (OSError, ValueError):
        return SignalState.GONE
    found = SignalState.DONE
    if status["State"].startswith(("Z", "X")):
        found = SignalState.GONE
    elif "SigCgt" not in status:
        found = SignalState.UNKNOWN
    elif not _has(status, "SigCgt", signum) and not _has(status, "SigIgn", signum):
        found = SignalState.UNHANDLED
    elif status["State"].startswith(("T", "t")):
        found = SignalState.STOPPED if status["State"].startswith("T") else SignalState.TRACED
    elif _has(status, "ShdPnd", signum) or any(
        _has(thread, "SigPnd", signum) for thread in threads.values()
    ):
        found = SignalState.PENDING
    elif any(_has(threads[task], "SigBlk", signum) for task in threads.keys() - blocking):
        found = SignalState.RUNNING
    elif is_exiting(pid):
        found = SignalState.GONE
    return found


def _has(status: dict[str, str], mask: str, signum: int) -> bool:
    return bool(int(status[mask], 16) & 1 << (signum - 1))


def _read_threads(pid: int) -> dict[str, dict[str, str]]:
    """Return the status of each thread of a process, except for those that end meanwhile."""
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            found[task] = read_status(f"/proc/{pid}/task/{task}/status")
    return found


def handles_signal(pid: int, signum: int) -> bool:
    """Return whether a process would survive a signal, as it handles, ignores or blocks it."""
    if signum in _HARMLESS or signal_state(pid, signum) is not SignalState.UNHANDLED:
        return True
    return str(pid) in threads_blocking(pid, signum)  # for sigwait()


def read_status(path: str) -> dict[str, str]:
    """Return the fields of a status file in /proc (proc_pid_status(5))."""
    with open(path, encoding="utf-8", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}


def marked_processes(entry: str) -> list[int]:
    """Return other processes that started with ``entry``, ``NAME=value``, in their environment.

    A fork shows the environment with which its parent's program was started (proc(5)).
    """
    if not _ON_LINUX:
        import psutil

        variable, _, value = entry.partition("=")
        processes = psutil.process_iter(["environ"])
        marked = [each for each in processes if (each.info["environ"] or {}).get(variable) == value]
        return [each.pid for each in marked if each.pid != os.getpid()]
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            # It may have ended, or belong to another user.
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if os.fsencode(entry) in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def started_at(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; ``None`` if it has ended.

    Source:
        Field 22 of ``/proc/PID/stat``, proc(5).
    """
    state, *fields = read_stat(pid)
    return fields[18] if state not in ("", "Z", "X") else None


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if there is no such process."""
    _, *fields = read_stat(pid)
    return int(fields[0]) if fields else 0
