"""Open MPI on several hosts: mpirun runs on the first and reaches the others as if by ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hosts import Hosts

_AGENT = """\
#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
host=$1
shift
case $host in
{cases}
esac
exec $enter sh -c "$*"
"""

Mpirun = Callable[..., subprocess.CompletedProcess[str]]


def mpirun_words(
    hosts: Hosts, folder: Path, *, slots: int, on: Sequence[int] | None = None
) -> list[str]:
    """Return an ``mpirun`` prefix for the first host, with ``slots`` on each host.

    ``on`` lists the hosts that get processes; the default is all.
    """
    agent = write_agent(hosts, folder)
    used = range(len(hosts.names)) if on is None else on
    places = ",".join(f"{hosts.addresses[host]}:{slots}" for host in used)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--mca", "plm_rsh_agent", str(agent),
            "--mca", "oob_tcp_if_include", "eth0", "-H", places]  # fmt: skip


def write_agent(hosts: Hosts, folder: Path) -> Path:
    """Write a script that runs a command on a host as ssh would, ignoring ssh's options."""
    agent = folder / "agent"
    entries = [shlex.join(hosts.enter(host, from_a_host=True)) for host in range(len(hosts.names))]
    cases = "\n".join(
        f"  {name}|{address}) enter='{entry}' ;;"
        for name, address, entry in zip(hosts.names, hosts.addresses, entries, strict=True)
    )
    agent.write_text(_AGENT.format(cases=cases))
    agent.chmod(0o755)
    return agent


@pytest.fixture
def mpirun(tmp_path: Path) -> Mpirun:
    """A function that runs mpirun and waits for it: (hosts, *words, slots=2, on=None)."""
    if shutil.which("mpirun") is None or shutil.which("orted") is None:
        pytest.skip("Open MPI needs mpirun, orted")

    def run(
        hosts: Hosts,
        *words: str | Path,
        slots: int = 2,
        on: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[str]:
        start = mpirun_words(hosts, tmp_path, slots=slots, on=on)
        return hosts.run(0, [*start, *words], **kwargs)

    return run
