"""What starts a process on another host: ssh, what a scheduler has for that, or a plug-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrun.errors import UsageError
from meshrun.host.entry_points import entry_points, load
from meshrun.plan.hostfile import Host
from meshrun.plan.request import Remote
from meshrun.ssh.remote_command import ssh_command

PLUG_INS = "meshrun.launchers"
"""The group of entry points that name functions from (host, line) to words."""
Starter = Callable[[Host, str], list[str]]
"""From a host, and a line for a shell there, to the words of a process here that runs it.

What that process reads and writes is what the line there does; it ends when that does.
"""
_OF_SCHEDULERS: Mapping[str, tuple[str, ...]] = {
    "blaunch": ("blaunch",),  # of LSF
    "qrsh": ("qrsh", "-inherit"),  # of Grid Engine
}


def find_starter(remote: Remote) -> Starter:
    """Return what a launch starts its agents by.

    Raises:
        UsageError: If there is no such thing, or it cannot be loaded.
    """
    if remote.way:
        return lambda host, _: [*remote.way, host.destination]
    reach = remote.reach
    if reach.starter in ("", "ssh"):
        return lambda host, line: ssh_command(reach.ssh, host, line, reach.connect_timeout_s)
    if reach.starter in _OF_SCHEDULERS:
        words = _OF_SCHEDULERS[reach.starter]
        return lambda host, line: [*words, host.destination, line]
    found = entry_points(PLUG_INS)
    if reach.starter not in found:
        known = ", ".join(("ssh", *_OF_SCHEDULERS, *found))
        raise UsageError(
            f"--launcher: unknown launcher `{reach.starter}`",
            hint=f"use {known}, or install a package with an entry point in {PLUG_INS}",
        )
    plug_in = load(PLUG_INS, reach.starter, found[reach.starter])
    return lambda host, line: [str(word) for word in plug_in(host.destination, line)]
