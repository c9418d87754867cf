"""What a process inherits from its parent, for a process forked elsewhere to take on. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping

from msgspec import Struct

from meshrun.host.process_state import parent_of, read_status
from meshrun.host.processes import open_pidfd

_OF_STATUS = (
    "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
    "Seccomp", "Seccomp_filters", "Mems_allowed", "THP_enabled",
)  # fmt: skip
_READ = ("cgroup", "attr/current", "personality")
_WRITABLE = ("oom_score_adj", "coredump_filter", "timerslack_ns")
_HEXADECIMAL = "coredump_filter"
"""The kernel prints it without the ``0x`` that it expects."""
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
"""The number of the system call; the C library has no function for it."""
_LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))
_RESET_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
"""Signals that ``subprocess`` resets and every interpreter then ignores."""


class Inherited(Struct, frozen=True, kw_only=True):
    """The inherited properties that a process can change; the working folder is passed apart."""

    environment: dict[str, str]
    umask: int
    soft_limits: dict[str, int]
    cpus: list[int]
    ignored: list[int]
    blocked: list[int]
    files: dict[str, str]
    """The content of files in ``/proc/self``."""

    def apply(self, folder: int) -> None:
        """Give this process the properties, as if it had inherited them.

        Args:
            folder: A descriptor of the working folder.

        Raises:
            OSError: If the kernel refuses one of them.
        """
        os.fchdir(folder)
        if (multiprocessing := sys.modules.get("multiprocessing.process")) is not None:
            # For spawned children, in place of '' in sys.path.
            vars(multiprocessing)["ORIGINAL_DIR"] = os.getcwd()
        os.umask(self.umask)
        for name, soft in self.soft_limits.items():
            which = getattr(resource, name)
            resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))
        os.sched_setaffinity(0, self.cpus)
        for name, text in self.files.items():
            _write(name, text)
        for signum in signal.valid_signals() - _RESET_BY_PYTHON - {signal.SIGKILL, signal.SIGSTOP}:
            if signum in self.ignored:
                signal.signal(signum, signal.SIG_IGN)
            elif signum == signal.SIGINT:
                signal.signal(signum, signal.default_int_handler)
            elif signal.getsignal(signum) != signal.SIG_DFL:
                signal.signal(signum, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self.environment)
        time.tzset()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def read_inherited(environment: Mapping[str, str]) -> Inherited:
    """Return what a child of this process would inherit, with this environment."""
    ignored = int(read_status("/proc/self/status")["SigIgn"], 16)
    os.umask(umask := os.umask(0o077))
    return Inherited(
        environment=dict(environment),
        umask=umask,
        soft_limits={name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS},
        cpus=sorted(os.sched_getaffinity(0)),
        ignored=[number for number in signal.valid_signals() if ignored >> (number - 1) & 1],
        blocked=[*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        files={name: _read(name) for name in _WRITABLE},
    )


def fixed_by_parent(pid: int = 0) -> dict[str, str]:
    """Return the inherited properties that a process cannot change, or only with privileges.

    If two processes differ in any of them, forks of one cannot replace children of the other.

    Args:
        pid: The process; 0 for this one.

    Raises:
        OSError: If it has ended, or has more privileges and so may not be examined.
    """
    place = f"/proc/{pid or 'self'}"
    status = read_status(f"{place}/status")
    found = {name: status.get(name, "") for name in _OF_STATUS}
    found.update({name: _read(name, place) for name in _READ})
    for name in sorted(os.listdir(f"{place}/ns")):
        found[f"{name} namespace"] = os.readlink(f"{place}/ns/{name}")
    root = os.stat(f"{place}/root/")
    found["root"] = f"{root.st_dev}:{root.st_ino}"
    found["nice value"] = str(os.getpriority(os.PRIO_PROCESS, pid))
    found["I/O priority"] = _io_priority(pid)
    found["scheduler"] = f"{os.sched_getscheduler(pid)} {os.sched_getparam(pid).sched_priority}"
    found["memory policy"] = _memory_policy(place)
    for name in _LIMITS:
        found[name] = str(resource.prlimit(pid, getattr(resource, name))[1])
    return found


def process_namespace() -> str:
    """Return the pid namespace of this process; "" if the system has none."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def why_unsupported() -> str | None:
    """Return what this system lacks to compare processes and refer to them; ``None`` if nothing."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/ns"):
        return "Linux"
    try:
        os.close(open_pidfd(os.getpid()))
    except OSError as error:  # an older kernel, or a sandbox
        return f"pidfd_open(2) of Linux 5.3 ({error.strerror})"
    return None


def leader_of_session(pid: int) -> int:
    """Return the leader of the session, such as a shell, that a process was started from.

    A process that leads a session itself, as one started by ``launch()`` does, was started from its
    parent's. 0 if there is no leader.
    """
    try:
        while pid > 1:
            if (leader := os.getsid(pid)) not in (0, pid):
                return leader
            pid = parent_of(pid)
    except OSError:  # it has ended
        pass
    return 0


def _memory_policy(place: str) -> str:
    """Return the policy that ``numactl`` has set, from the first mapping; "" if unknown.

    Source:
        numa(7), ``/proc/PID/numa_maps``.
    """
    with contextlib.suppress(OSError, IndexError), open(f"{place}/numa_maps", "rb") as file:
        return file.readline().split()[1].decode()
    return ""


def _io_priority(pid: int) -> str:
    """Return the priority that ``ionice`` has set, as the kernel's number; "" without one.

    Source:
        ioprio_set(2): the class is in the bits from 13 on; without one, the rest has no meaning.
    """
    number = _IOPRIO_GET.get(os.uname().machine)
    found = 0 if number is None else ctypes.CDLL(None).syscall(number, 1, pid)
    return str(found) if found >> 13 > 0 else ""


def _read(name: str, place: str = "/proc/self") -> str:
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"{place}/{name}", encoding="utf-8") as file,
    ):
        return file.read().strip("\0\n")
    return ""


def _write(name: str, text: str) -> None:
    if text != _read(name):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(f"0x{text}" if name == _HEXADECIMAL else text)
