"""A random fault hits one of several nodes: all exit alike, report the cause, and leave nothing.

``MESHRUN_NODE_FAULTS`` is the number of cases, ``MESHRUN_NODE_FAULTS_FROM`` the first.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.engines.faults import LOST, Case, draw
from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, all_gone, as_shell, wait_for_all
from tests.kit import PROGRAMS, wait_until

pytestmark = pytest.mark.torch
COUNT = int(os.environ.get("MESHRUN_NODE_FAULTS", "60"))
FIRST = int(os.environ.get("MESHRUN_NODE_FAULTS_FROM", "0"))
_JOIN_S = 20  # for cases in which a node never joins


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(FIRST, FIRST + COUNT))
def test_whatever_happens_to_a_node(number: int, make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Each surviving launcher exits with the code of the cause, and no process is left."""
    case = draw(number)
    print(f"\nMESHRUN_NODE_FAULTS=1 MESHRUN_NODE_FAULTS_FROM={number}  # {case}")
    hosts = make_hosts(case.nodes)
    launches = _start(case, hosts, tmp_path)
    _wait_for_phase(case, launches, tmp_path)
    began = time.monotonic()
    _strike(case, hosts, launches[case.victim], tmp_path)
    if case.phase == "importing":
        (tmp_path / "go").touch()
    codes = [as_shell(launch.end()) for launch in launches]
    print(f"{codes} after {time.monotonic() - began:.1f} s")
    for launch in launches:
        print(f"--- node {launch.host}:\n{launch.text}")

    _check(case, codes, launches)
    all_gone(hosts)
    if case.fault == "host":  # no process was left there to clean up
        for left in Path(tempfile.gettempdir()).glob("meshrun*"):
            shutil.rmtree(left)


def _start(case: Case, hosts: Hosts, folder: Path) -> list[Launch]:
    words = ["--nnodes", str(case.nodes), "--nproc-per-node", str(case.workers)]
    words += ["--rdzv-backend", case.backend, "--rdzv-endpoint", "node0:29500"]
    words += ["--node-timeout", "4", "--shutdown-timeout", "1"]
    words += ["--max-restarts", str(case.generation)]
    if case.is_early:
        words += ["--rdzv-conf", f"join_timeout={_JOIN_S}"]
    if case.phase == "importing":
        words += ["--preload", "held_import"]
    words += [str(PROGRAMS / "held.py"), str(folder), case.place, str(case.generation)]
    env = {
        "HELD_RANK": str(case.rank),
        "HELD_IMPORTS": str(folder),
        "PYTHONPATH": str(PROGRAMS),
    }
    started = case.nodes - 1 if case.phase == "rendezvous" else case.nodes
    return [Launch(hosts, host, words, env=env) for host in range(started)]


def _wait_for_phase(case: Case, launches: list[Launch], folder: Path) -> None:
    if case.phase == "rendezvous":
        wait_for_all(launches, "waiting ")
        return
    if case.phase == "restarting":
        launches[case.victim].wait_for("restart 1 of 1")
        return
    files = [f"importing.node{launch.host}" for launch in launches]
    if case.phase != "importing":
        ranks = range(case.nodes * case.workers)
        files = [f"at.{case.generation}.{rank}" for rank in ranks]
    wait_until(
        lambda: all((folder / name).exists() for name in files),
        lambda: "\n".join(f"node {launch.host}:\n{launch.text}" for launch in launches),
    )


def _strike(case: Case, hosts: Hosts, victim: Launch, folder: Path) -> None:
    match case.fault:
        case "launcher":
            os.kill(victim.process.pid, signal.SIGKILL)
        case "term":
            victim.send(signal.SIGTERM)
        case "zygote":
            children = psutil.Process(victim.process.pid).children()
            os.kill(min(child.pid for child in children), signal.SIGKILL)
        case "rank":
            pid = int((folder / f"at.{case.generation}.{case.rank}").read_text())
            os.kill(pid, signal.SIGKILL)
        case "host":
            hosts.kill_all(case.victim)
        case "cut":
            hosts.cut(case.victim)
        case "raise":
            (folder / "raise").touch()


def _check(case: Case, codes: list[int], launches: list[Launch]) -> None:
    alive = [
        (launch, code)
        for launch, code in zip(launches, codes, strict=True)
        if launch.host != case.victim or case.has_launcher
    ]
    if case.is_early:  # the others may be notified, or time out
        assert {code for _, code in alive} <= {LOST, case.code}
        return
    assert {code for _, code in alive} == {case.code}
    for launch, _ in alive:
        assert case.cause(launch.host) in launch.text
    for launch, _ in alive:
        assert "this is a bug in meshrun" not in launch.text
        assert "/meshrun/supervisor/" not in launch.text
