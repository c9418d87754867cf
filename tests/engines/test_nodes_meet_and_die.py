"""Nodes meet and one is killed, many times: nothing hangs and no process is left."""

from __future__ import annotations

import os
import random
import signal

import psutil
import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import Launch, all_gone, as_shell
from tests.kit import PROGRAMS, wait_until
from tests.variations import ordinary

pytestmark = pytest.mark.torch
TOGETHER = PROGRAMS / "together.py"
AT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=2,tp=2")
MOST = 4
"""Processes below a launcher once its ranks run: zygote, store or guard, and two ranks."""
CYCLES = ordinary(range(25), 7)
"""The ordinary one kills the coordinator during training; an earlier kill may cost join_timeout."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("number", CYCLES)
def test_nodes_meet_and_one_is_killed(make_hosts: MakeHosts, number: int, backend: str) -> None:
    """Victim and moment are random: from its first process to the middle of training."""
    drawn = random.Random(f"{backend} {number}")
    victim, processes = drawn.randrange(2), drawn.randint(1, MOST)
    hosts = make_hosts(2)
    words = ["--rdzv-backend", backend, "--rdzv-conf", "join_timeout=20", *AT, TOGETHER, "stay"]
    launches = [Launch(hosts, host, words) for host in (0, 1)]
    wait_until(
        lambda: count_below(launches[victim]) >= processes,
        lambda: f"{processes} processes on node {victim}:\n{launches[victim].text}",
    )
    os.kill(launches[victim].process.pid, signal.SIGKILL)

    assert as_shell(launches[victim].end()) == 128 + signal.SIGKILL
    assert as_shell(launches[1 - victim].end()) == 69, launches[1 - victim].text
    all_gone(hosts)


def count_below(launch: Launch) -> int:
    """Return how many processes are running below a launcher."""
    return len(psutil.Process(launch.process.pid).children(recursive=True))
