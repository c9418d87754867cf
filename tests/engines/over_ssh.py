"""Launches of ``meshrun --hosts``, and the processes they have on each host."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.engines.sshd import Sshd
from tests.engines.together import Launch
from tests.kit import PROGRAMS, wait_until

SAYS = PROGRAMS / "nodes.py"
TICKS = PROGRAMS / "ticks.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--mesh", "dp=2,tp=2")


def launch(sshd: Sshd, *words: str | Path, hosts: str | None = None, **kwargs: object) -> Launch:
    """Start meshrun on the first host, for all hosts or those in ``hosts``."""
    named = ["--ssh", sshd.ssh, "--hosts", hosts or sshd.all]
    return Launch(sshd.hosts, 0, [*named, *words], **kwargs)


def all_gone(sshd: Sshd) -> None:
    """Wait until no process is left on any host, not even ssh."""
    hosts = range(len(sshd.hosts.names))
    wait_until(
        lambda: not any(sshd.processes(host) for host in hosts),
        lambda: str([words_of(sshd, host) for host in hosts]),
    )


def words_of(sshd: Sshd, host: int) -> list[str]:
    """Return the command lines on a host, as any user can read them."""
    found = []
    for pid in sshd.processes(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        found.append(words.replace(b"\0", b" ").decode())
    return found


def pids_of(sshd: Sshd, host: int, text: str) -> list[int]:
    """Return the processes on a host whose command line contains ``text``."""
    found = []
    for pid in sshd.processes(host):
        try:
            if text in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(pid)
        except OSError:
            continue
    return found


def ranks_of(sshd: Sshd) -> list[psutil.Process]:
    """Return the ranks on all hosts."""
    hosts = range(len(sshd.hosts.names))
    return [psutil.Process(pid) for host in hosts for pid in pids_of(sshd, host, "meshrun rank")]
