"""How many files this process may have open."""

from __future__ import annotations

import resource

from meshrun.errors import HostError


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
