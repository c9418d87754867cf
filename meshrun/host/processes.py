"""Process trees: subreapers, parent-death signals, titles, and killing leftover processes.

Every orphan below a subreaper becomes its child, so a subreaper without children has no descendants
at all; ``waitpid`` proves that without reading the process table (prctl(2)).
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from msgspec import Struct

from meshrun.errors import HostError
from meshrun.host.process_state import read_proc, read_stat
from meshrun.host.reactor import Steps, finish

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PTRACE_DETACH = 17
_GUARD = b"meshrun-guard"
_PR_SET_CHILD_SUBREAPER = 36
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
_SEND_SIGNAL, _OPEN = 424, 434
"""Numbers of pidfd_send_signal(2) and pidfd_open(2), of Linux 5.3, which all architectures share.

Python has no functions for them if it was built for an older system, as conda's is.

Source:
    ``include/uapi/asm-generic/unistd.h``.
"""
_ARG_START = 48 - 3
"""Index of fields 48 and 49 of ``/proc/PID/stat`` in a list that begins with field 3 (proc(5))."""


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
    name = read_proc(pid, "comm").strip()
    if name == _GUARD:
        return _Turn.GUARD
    # The kernel may hold a process so that reading its command line would not return.
    is_tracker = name == _INTERPRETER and _RESOURCE_TRACKER in read_proc(pid, "cmdline")
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


def open_pidfd(pid: int) -> int:
    """Return a descriptor of a process, which becomes readable when the process ends.

    Unlike a pid, it never refers to another process.

    Raises:
        OSError: If there is no such process, or the system or a sandbox has no such descriptors.
    """
    return _call(_OPEN, pid, 0)


def send_signal_to(pidfd: int, signum: int) -> None:
    """Send a signal to a process.

    Raises:
        OSError: If it has ended, or this user may not signal it.
    """
    _call(_SEND_SIGNAL, pidfd, signum, None, 0)


def has_ended(pidfd: int, *, within_s: int = 0) -> bool:
    """Return whether a process has ended, or ends within this time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _call(number: int, *arguments: int | None) -> int:
    if _LIBC is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    found: int = _LIBC.syscall(number, *arguments)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


def set_title(*words: str) -> None:
    """Set the title to ``meshrun`` and these words; do nothing if the system cannot.

    The title overwrites the process's arguments, of which Python has a copy, and is cut to their
    length. The last byte is not zero, which makes the kernel end the command line with the title;
    otherwise, each byte left would show as an empty argument (``get_mm_cmdline`` in
    ``fs/proc/base.c``).
    """
    try:
        start, end = map(int, read_stat(os.getpid())[_ARG_START : _ARG_START + 2])
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError):  # not Linux, or a sandbox
        return
    try:
        room = end - start
        if 0 < len(shown) <= room and room > 2 and os.pread(memory, len(shown), start) == shown:
            title = " ".join(("meshrun", *words)).encode(errors="surrogateescape")
            os.pwrite(memory, title[: room - 2].ljust(room - 1, b"\0") + b".", start)
    except OSError:
        pass
    finally:
        os.close(memory)


def name_thread(name: str) -> None:
    """Name the calling thread, with up to 15 letters; do nothing if the system cannot."""
    try:
        with open("/proc/thread-self/comm", "w", encoding="utf-8") as file:
            file.write(name)
    except OSError:  # not Linux, or a sandbox
        pass


class EnvironVariable:
    """A variable in the memory that ``/proc/PID/environ`` shows; forks may change their copies.

    Create it before Python changes the variable.

    Source:
        proc(5): ``environ`` shows the memory to which the kernel wrote the initial environment.
    """

    def __init__(self, name: str) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.getenv.restype = ctypes.c_void_p
        self._name = name
        self._length = len(os.fsencode(os.environ.get(name, "")))
        self._address = self._libc.getenv(os.fsencode(name))

    def set(self, value: str) -> None:
        """Set a value, as long as the initial one, in ``os.environ`` and ``/proc/PID/environ``.

        Raises:
            ValueError: If the lengths differ.
        """
        text = os.fsencode(value)
        if len(text) != self._length:
            raise ValueError(f"{self._name} has {self._length} bytes, and {value!r} {len(text)}")
        if self._address:
            ctypes.memmove(self._address, text, len(text))
        os.environ[self._name] = value
