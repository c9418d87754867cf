"""What this machine has run out of, from errors and, on Linux, from the kernel's counters."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshrun.errors import HostError
from meshrun.host.sysfs import cgroup_folders, read_counter, read_number
from meshrun.wording import count

TOO_FEW_PROCESSES = (
    "check `ulimit -u`, pids.max of the cgroup, and `free -h`: processes or memory may have run out"
)
"""What to try if no process can be started."""
_MEMORY = "check `free -h`, `ulimit -v`, and the memory limit of the cgroup"
_DISK = "free some space, or set TMPDIR to a folder with free space"
_HINTS = {
    errno.EMFILE: "raise the limit with `ulimit -n`, which is {files}",
    errno.ENFILE: "see /proc/sys/fs/file-nr: this machine has too many files open",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.EAGAIN: "check `ulimit -u` and pids.max of the cgroup",
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EIO: "see `dmesg`: a disk or a network file system may have failed",
    errno.EROFS: "set TMPDIR to a writable folder",
    errno.ESTALE: "a network file system was replaced: start again in a new shell",
}
"""What to try for each error number; the limit on open files in place of ``{files}``."""
REFUSED = (
    "see the seccomp profile of the container, or SystemCallFilter= of the systemd service, which"
    " may forbid a system call"
)
"""What to try if a system call is refused that needs no permission."""
_FULL_BYTES = 1024 * 1024
_COUNTS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files of a cgroup, of version 2 and version 1."""


def hint_for(number: int | None) -> str | None:
    """Return what to try for an error number, if it means that this machine lacks something."""
    hint = _HINTS.get(number or 0)
    return hint and hint.format(files=resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def describe_shortage(error: BaseException) -> HostError | None:
    """Return what this machine lacks, if that is why ``error`` was raised; else ``None``."""
    if isinstance(error, MemoryError):
        return HostError("this machine is out of memory", hint=_MEMORY)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return HostError("cannot start a thread", hint=_HINTS[errno.EAGAIN])
    path, number = None, None
    if isinstance(error, OSError):
        path, number = error.filename, error.errno
    elif isinstance(error, ImportError):
        path, number = error.path, _number_in(str(error))
    is_refused = number in (errno.EPERM, errno.ENOSYS) and path is None
    hint = REFUSED if is_refused else hint_for(number)
    if number is None or hint is None:
        return None
    what = "the operating system refused what meshrun needs"
    if isinstance(path, str | bytes):
        what = f"cannot use `{os.fsdecode(path)}`"
    return HostError(f"{what}: {os.strerror(number)}", hint=hint)


def _number_in(text: str) -> int | None:
    """Return the number of the error in a message of dlopen(), which only describes it."""
    if text.endswith("failed to map segment from shared object"):
        return errno.ENOMEM
    return next((number for number in _HINTS if text.endswith(f": {os.strerror(number)}")), None)


@contextmanager
def reporting_shortages() -> Iterator[None]:
    """Report an error of the block that means that this machine lacks something as such.

    Raises:
        HostError: In place of such an error.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if (shortage := describe_shortage(error)) is None:
            raise
        raise shortage from error


class MemoryWatch:
    """The kernel's counters at the start of the launch, for later comparison.

    Source:
        kernel, Documentation/admin-guide/cgroup-v2.rst (``memory.events``) and
        cgroup-v1/memory.rst (``memory.oom_control``); ``oom_kill`` in proc(5), ``/proc/vmstat``.
    """

    def __init__(self, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        folders = cgroup_folders("memory", proc, sysfs)
        counted = (each for each in folders if any((each / name).exists() for name in _COUNTS))
        self._cgroup = next(counted, None)
        """The folder of this process's cgroup, or of its nearest visible ancestor."""
        self._vmstat = proc / "vmstat"
        self._in_cgroup = self._count_in_cgroup()
        self._in_machine = read_counter(self._vmstat, "oom_kill")

    def why_killed(self) -> str | None:
        """Return a sentence about out-of-memory kills since the start, or the limit of CPU time.

        It is ``None`` if there is neither.
        """
        if self._cgroup is not None and (new := self._count_in_cgroup() - self._in_cgroup) > 0:
            limits = [read_number(self._cgroup / name) for name in _LIMITS]
            limit = next((limit for limit in limits if limit is not None and limit < 2**60), None)
            at = f" of {limit / 2**30:.1f} GiB" if limit else ""
            killed = f"the kernel killed {count(new, 'process')} at this job's limit{at}"
            return f"out of memory: {killed}"
        new = read_counter(self._vmstat, "oom_kill") - self._in_machine
        if new > 0:
            # This includes kills at the limit of other cgroups.
            killed = f"the kernel killed {count(new, 'process')} on this machine meanwhile"
            return f"possibly out of memory: {killed}"
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        if most == resource.RLIM_INFINITY:
            return None
        return f"possibly at the limit of CPU time: `ulimit -t` is {most} s"

    def _count_in_cgroup(self) -> int:
        files = [self._cgroup / name for name in _COUNTS] if self._cgroup is not None else []
        return max((read_counter(file, "oom_kill") for file in files), default=0)


def describe_limited_memory() -> str | None:
    """Return a sentence if the memory of each process is limited, else ``None``."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    return f"`ulimit -v` is {most // 1024}: {most / 2**30:.1f} GiB for each process"


def describe_full_shm(path: str = "/dev/shm") -> str | None:  # noqa: S108 - only inspected
    """Return a sentence if shared memory is full, else ``None``."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    if found.f_bavail * found.f_frsize >= _FULL_BYTES:
        return None
    size = found.f_blocks * found.f_frsize
    return f"{path} is full: {size / 2**20:,.0f} MiB"


class ProcessLimit:
    """The kernel's counters at the start of the launch, for later comparison.

    Source:
        kernel, Documentation/admin-guide/cgroup-v2.rst (``pids.events``, ``pids_localevents``):
        version 1, and older kernels, count in the cgroup of the process, even if the limit that it
        reached is that of a cgroup above; newer kernels count where the limit is.
    """

    def __init__(self, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> None:
        self._folders = [*cgroup_folders("pids", proc, sysfs)]
        self._before = self._refused()

    def why_refused(self) -> str | None:
        """Return that the limit was reached since the start; ``None`` if it was not."""
        refused = zip(self._refused(), self._before, strict=True)
        for place, (now, before) in enumerate(refused):
            limits = (read_number(folder / "pids.max") for folder in self._folders[place:])
            limit = next((limit for limit in limits if limit is not None), None)
            if now > before and limit is not None:
                what = f"its limit of {limit:,} processes and threads"
                return f"this job reached {what}, pids.max of its cgroup"
        return None

    def _refused(self) -> list[int]:
        return [read_counter(folder / "pids.events", "max") for folder in self._folders]
