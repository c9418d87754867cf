"""A process of meshrun itself is killed on one of several nodes: restart or go on without it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.over_ssh import pids_of
from tests.engines.sshd import MakeSshd
from tests.engines.test_resize import start_all
from tests.engines.together import Launch, all_gone, end_all, launch_on, wait_for_all
from tests.kit import PROGRAMS, STORE, ZYGOTE, lost_node

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = PROGRAMS / "elastic.py"
STATIC = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=2,tp=1")


def kill(launch: Launch, what: str) -> None:
    """Kill a node's zygote, or the process that guards its ranks and may host the store."""
    [zygote] = psutil.Process(launch.process.pid).children()
    if what == "zygote":
        zygote.kill()
        return
    [guard] = [each for each in zygote.children() if each.name() == "meshrun-guard"]
    guard.kill()


def cause(what: str, host: int) -> str:
    """Return how the cause of a restart is reported."""
    guard = "the process that guards the ranks" if host else STORE
    name = ZYGOTE if what == "zygote" else guard
    on = f"node{host}" if host else "node 0"
    return f"on {on}, {name} was killed by SIGKILL\n"


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["static", "elastic"])
def test_all_nodes_start_again(how: str, make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Whichever node was hit, while restarts are left; the nodes keep their numbers."""
    hosts, more = make_hosts(2), ("--max-restarts", "4", "--nproc-per-node", "1")
    if how == "static":
        launches = launch_on(hosts, *STATIC, *more, PROGRAM, tmp_path)
    else:
        launches = start_all(hosts, 2, tmp_path, *more, mesh="dp=1:8,tp=1")
    # Never twice in a row on one node, or the others would go on without it.
    struck = [(1, "guard"), (0, "zygote"), (1, "zygote"), (0, "store")]
    for number, (host, what) in enumerate(struck, start=1):
        wait_for_all(launches, f" in {number - 1} on ")
        kill(launches[host], what)
        for launch in launches:
            launch.wait_for(f"restart {number} of 4")
            assert f"because {cause(what, host)}" in launch.text.replace("; none", "\n; none")
    wait_for_all(launches, " in 4 on ")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize(("what", "code"), [("guard", 71), ("zygote", 137)])
def test_an_elastic_launch_without_restarts_goes_on_without_the_node(
    what: str, code: int, make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The node reports what was killed and exits with its code; the others report it too."""
    hosts = make_hosts(2)
    launches = start_all(hosts, 2, tmp_path, mesh="dp=1:8,tp=1")
    kill(launches[1], what)
    launches[0].wait_for("generation 1 runs without node1: dp 2 -> 1")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, code], launches[1].text
    why = cause(what, 1).strip().partition(", ")[2]
    assert f"error: {why}" in launches[1].text
    assert f"{lost_node(1)}{why}" in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_static_launch_without_restarts_ends(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """On all nodes, with the same exit code."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *STATIC, "--nproc-per-node", "1", PROGRAM, tmp_path)
    wait_for_all(launches, " in 0 on ")
    kill(launches[1], "zygote")

    assert end_all(launches) == [137, 137], launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_hosts_start_again(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """With --hosts, as with a launcher started on each host."""
    sshd = make_sshd(2)
    words = ("--ssh", sshd.ssh, "--hosts", sshd.all, "--max-restarts", "1")
    run = Launch(
        sshd.hosts, 0, [*words, "--mesh", "dp=2,tp=1", "--nproc-per-node", "1", PROGRAM, tmp_path]
    )
    run.wait_for(" in 0 on ", times=2)
    os.kill(min(pids_of(sshd, 1, "meshrun zygote")), signal.SIGKILL)
    run.wait_for(f"restart 1 of 1, because {cause('zygote', 1)}")
    run.wait_for(" in 1 on ", times=2)
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
