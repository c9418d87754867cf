"""Which files this process has open, and how many it may have."""

from __future__ import annotations

import os
import resource

from meshrun.errors import HostError


def open_standard_streams() -> None:
    """Open what is missing of stdin, stdout and stderr on the null device.

    A pipe of ours would take the free number otherwise, and ranks would write into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def allow_descriptors(count: int) -> None:
    """Raise this process's soft limit so that ``count`` descriptors can be open.

    Raises:
        HostError: If the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise HostError(
            f"{count} open files are needed for these ranks, and the limit is {hard}",
            hint=f"raise it with `ulimit -n {count}`, or start fewer ranks on this node",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
