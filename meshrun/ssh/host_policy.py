"""What differs between a launch on a fixed number of hosts and an elastic one. Pure.

Nothing else in this package asks which of the two a launch is.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from meshrun.plan.hostfile import Host
from meshrun.ssh.host_phases import ControllerPhase


class HostPolicy(Struct, frozen=True, kw_only=True):
    """What a host means to a launch: :data:`FIXED` or :data:`ELASTIC`."""

    needs_all: bool
    """Whether the launch fails without any of its hosts, rather than only without the first."""
    ends_with_first: bool
    """Whether the other hosts are to end once the first one has succeeded."""
    after_loss: ControllerPhase
    """What follows once a host that the launch needs is lost."""
    workers_on: Callable[[tuple[int, ...], int, Host], tuple[int, ...] | int | None]
    """Returns what the launcher on a host is told of the workers of all, in the order of hosts."""


def _own_workers(workers: tuple[int, ...], number: int, host: Host) -> int | None:
    return workers[number] if number < len(workers) else host.workers


FIXED = HostPolicy(
    needs_all=True,
    ends_with_first=False,
    after_loss=ControllerPhase.ENDING,
    workers_on=lambda workers, *_: workers,
)
"""All hosts take part until the end."""

ELASTIC = HostPolicy(
    needs_all=False,
    ends_with_first=True,
    after_loss=ControllerPhase.RESTARTING,
    workers_on=_own_workers,  # its node rank may change
)
"""Lost hosts are tried again; the first one, where the others meet, decides how the launch ends."""
