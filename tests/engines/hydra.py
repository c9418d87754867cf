"""MPICH on several hosts: mpiexec runs on the first and reaches the others as if by ssh."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hosts import Hosts
from tests.engines.openmpi import write_agent

Mpiexec = Callable[..., subprocess.CompletedProcess[str]]


def mpiexec_words(hosts: Hosts, folder: Path, *, slots: int = 1, number: int = 0) -> list[str]:
    """Return an ``mpiexec`` prefix for the first host: ``number`` processes, ``slots`` a host."""
    agent = write_agent(hosts, folder)
    places = ",".join(f"{address}:{slots}" for address in hosts.addresses)
    count = number or slots * len(hosts.names)
    return ["mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", str(agent),
            "-localhost", hosts.addresses[0], "-hosts", places, "-n", str(count)]  # fmt: skip


@pytest.fixture
def mpiexec(tmp_path: Path) -> Mpiexec:
    """A function that runs mpiexec and waits for it: (hosts, *words, slots=1, number=0)."""
    if shutil.which("mpiexec.hydra") is None:
        pytest.skip("MPICH needs mpiexec.hydra")

    def run(
        hosts: Hosts, *words: str | Path, slots: int = 1, number: int = 0, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        start = mpiexec_words(hosts, tmp_path, slots=slots, number=number)
        return hosts.run(0, [*start, *words], **kwargs)

    return run
