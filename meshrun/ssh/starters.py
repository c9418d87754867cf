"""Finds what starts processes on other hosts: ssh, a scheduler's command, or a plug-in."""

from __future__ import annotations

from collections.abc import Callable

from meshrun.errors import UsageError
from meshrun.host.entry_points import call, entry_points, load
from meshrun.plan.choices import STARTERS_OF_SCHEDULERS
from meshrun.plan.hostfile import Host
from meshrun.plan.request import RemoteHosts
from meshrun.ssh.remote_command import ssh_command

PLUG_INS = "meshrun.launchers"
"""The group of entry points for functions from (host, line) to a command."""
Starter = Callable[[Host, str], list[str]]
"""Returns the local command that runs a line in a shell on a host.

Its stdin, stdout and stderr are those of the line there, and it exits when the line does.
"""


def find_starter(remote: RemoteHosts) -> Starter:
    """Return the function that makes the commands to start a launch's agents.

    Raises:
        UsageError: If it is unknown, or cannot be loaded.
    """
    if remote.start_command:
        return lambda host, _: [*remote.start_command, host.destination]
    access = remote.access
    if access.starter in ("", "ssh"):
        return lambda host, line: ssh_command(access.ssh, host, line, access.connect_timeout_s)
    if access.starter in STARTERS_OF_SCHEDULERS:
        words = STARTERS_OF_SCHEDULERS[access.starter]
        return lambda host, line: [*words, host.destination, line]
    found = entry_points(PLUG_INS)
    if access.starter not in found:
        known = ", ".join(("ssh", *STARTERS_OF_SCHEDULERS, *found))
        raise UsageError(
            f"--launcher: unknown launcher `{access.starter}`",
            hint=f"use {known}, or install a package with an entry point in {PLUG_INS}",
        )
    plug_in = load(PLUG_INS, access.starter, found[access.starter])

    def start(host: Host, line: str) -> list[str]:
        args, returns = (host.destination, line), (list, tuple)
        return [*map(str, call(PLUG_INS, access.starter, plug_in, *args, returns=returns))]

    return start
