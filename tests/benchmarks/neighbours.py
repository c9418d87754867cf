"""Room in the kernel's neighbour table, which all hosts on this machine share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.processes import NotMeasured

_LIMITS = sorted(Path("/proc/sys/net/ipv4/neigh/default").glob("gc_thresh*"), reverse=True)


@contextmanager
def room_for_neighbours(hosts: int) -> Iterator[None]:
    """Make room for every host to know every other; without it, packets get lost above 32 hosts.

    Raises:
        NotMeasured: If the limits cannot be raised.
    """
    before = {limit: limit.read_text() for limit in _LIMITS}
    needed = 2 * hosts * hosts
    try:
        for limit, value in before.items():
            if int(value) < needed:
                limit.write_text(str(needed))
        yield
    except PermissionError as error:
        raise NotMeasured(f"{hosts} hosts need a larger table of neighbours: {error}") from error
    finally:
        for limit, value in before.items():
            if limit.read_text() != value:
                limit.write_text(value)
