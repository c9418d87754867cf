"""What a process inherits from the one that starts it, for one that is forked elsewhere. Linux."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from meshrun.host.processes import read_status

_OF_STATUS = (
    "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
    "Seccomp", "Seccomp_filters", "Mems_allowed",
)  # fmt: skip
_READ = ("cgroup", "attr/current", "personality")
_LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))
_RESET_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
"""Signals that ``subprocess`` resets and every interpreter then ignores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What a process can be given later than at its start; the working folder is a descriptor."""

    environment: dict[str, str]
    umask: int
    soft_limits: dict[str, int]
    cpus: list[int]
    ignored: list[int]
    blocked: list[int]
    oom_score_adj: str

    def take_on(self, folder: int) -> None:
        """Have this process be as one that the other has started.

        Args:
            folder: A descriptor of its working folder.

        Raises:
            OSError: If the kernel refuses a part of it.
        """
        os.fchdir(folder)
        os.umask(self.umask)
        for name, soft in self.soft_limits.items():
            which = getattr(resource, name)
            resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))
        os.sched_setaffinity(0, self.cpus)
        _write("oom_score_adj", self.oom_score_adj)
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
    """Return what a process started by this one with this environment would have."""
    ignored = int(read_status("/proc/self/status")["SigIgn"], 16)
    os.umask(umask := os.umask(0o077))
    return Inherited(
        environment=dict(environment),
        umask=umask,
        soft_limits={name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS},
        cpus=sorted(os.sched_getaffinity(0)),
        ignored=[number for number in signal.valid_signals() if ignored >> (number - 1) & 1],
        blocked=[*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        oom_score_adj=_read("oom_score_adj"),
    )


def fixed_by_parent(pid: int = 0) -> dict[str, str]:
    """Return what a process has from its parent and cannot be given, or not without privileges.

    Where two processes differ in any of it, neither's forks can stand for children of the other.

    Args:
        pid: The process; 0 for this one.

    Raises:
        OSError: If it has ended, or may not be looked at, as one with more privileges.
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
    found["scheduler"] = f"{os.sched_getscheduler(pid)} {os.sched_getparam(pid).sched_priority}"
    found["memory policy"] = _memory_policy(place)
    for name in _LIMITS:
        found[name] = str(resource.prlimit(pid, getattr(resource, name))[1])
    return found


def process_namespace() -> str:
    """Return in which namespace this process's ids of others hold; "" if the system has none."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def is_supported() -> bool:
    """Whether this system tells all of this."""
    return sys.platform == "linux" and os.path.exists("/proc/self/ns")


def _memory_policy(place: str) -> str:
    """Return what ``numactl`` has set, from the first mapping; "" if the kernel does not tell.

    Source:
        numa(7), ``/proc/PID/numa_maps``.
    """
    with contextlib.suppress(OSError, IndexError), open(f"{place}/numa_maps", "rb") as file:
        return file.readline().split()[1].decode()
    return ""


def _read(name: str, place: str = "/proc/self") -> str:
    with contextlib.suppress(OSError, ValueError), open(f"{place}/{name}") as file:
        return file.read().strip("\0\n")
    return ""


def _write(name: str, text: str) -> None:
    if text != _read(name):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
