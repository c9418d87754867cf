"""meshrun --hosts with --nnodes MIN:MAX: hosts are lost and come back."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.engines.over_ssh import SAYS, TICKS, all_gone, launch, pids_of
from tests.engines.sshd import MakeSshd, Sshd
from tests.engines.together import Launch
from tests.kit import PROGRAMS, ZYGOTE, killed_launcher, lost_host

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = PROGRAMS / "elastic.py"


def start(
    sshd: Sshd, folder: Path, *more: str, nnodes: str, hosts: str | None = None, here: int = 0
) -> Launch:
    """Launch one rank on each host, from one of them."""
    return Launch(
        sshd.hosts,
        here,
        [
            *("--ssh", sshd.ssh, "--hosts", hosts or sshd.all, "--nnodes", nnodes),
            *("--nproc-per-node", "1", "--mesh", "dp=1:8,tp=1", "--node-timeout", "4"),
            *more,
            *(PROGRAM, str(folder)),
        ],
    )


def places(run: Launch, generation: int) -> list[str]:
    """Return the ranks of one generation with their hosts."""
    said = re.findall(r"rank (\d+ of \d+) in (\d+) on (\w+)", run.text)
    return sorted(f"{rank} on {host}" for rank, of, host in said if of == str(generation))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("agent", "ssh failed"),
        ("launcher", killed_launcher()),
        ("zygote", f"{ZYGOTE} was killed by SIGKILL"),
    ],
)
def test_a_launch_goes_on_without_a_lost_host_until_it_comes_back(
    make_sshd: MakeSshd, tmp_path: Path, what: str, why: str
) -> None:
    """Whichever process is killed, the others continue, and a launcher starts there again."""
    sshd = make_sshd(3)
    run = start(sshd, tmp_path, nnodes="2:3")
    run.wait_for(" in 0 on ", times=3)
    os.kill(pids_of(sshd, 1, f"meshrun {what}")[-1], signal.SIGKILL)
    run.wait_for("runs without node1: dp 3 -> 2")
    run.wait_for(f"continuing without host node1: {why}")
    run.wait_for("host node1 is back")
    run.wait_for("runs with node1: dp 2 -> 3")
    run.wait_for(" in 2 on ", times=3)
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
    assert "error:" not in run.text
    assert places(run, 1) == ["0 of 2 on node0", "1 of 2 on node2"]
    assert places(run, 2) == ["0 of 3 on node0", "1 of 3 on node2", "2 of 3 on node1"]
    all_gone(sshd)


@pytest.mark.nightly
def test_a_host_that_is_lost_before_all_have_met_keeps_its_place(
    make_sshd: MakeSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait until its launcher, which is killed as it starts, has started again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "place = os.path.join(os.path.dirname(__file__), 'killed')\n"
        "with open('/proc/self/cmdline') as file:\n"
        "    if '--node-rank\\0001' in file.read() and not os.path.exists(place):\n"
        "        os.mkdir(place)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "go").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sshd = make_sshd(3)
    run = start(sshd, tmp_path, nnodes="2:3")

    assert run.end() == 0, run.text
    assert f"continuing without host node1: {killed_launcher()}" in run.text
    assert places(run, 0) == [f"{rank} of 3 on node{rank}" for rank in range(3)]
    all_gone(sshd)


@pytest.mark.nightly
def test_a_host_that_cannot_be_used_is_tried_again(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """The others start without it, and it joins once ssh reaches it."""
    sshd = make_sshd(3)
    sshd.servers[0].kill()
    sshd.servers[0].wait()
    run = start(sshd, tmp_path, nnodes="1:3", here=1)
    run.wait_for("continuing without host node0: ssh failed: ")
    run.wait_for(" in 0 on ", times=2)
    sshd.servers[0] = sshd.serve(0)
    run.wait_for("host node0 is back")
    run.wait_for(" in 1 on ", times=3)
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
    assert places(run, 0) == ["0 of 2 on node1", "1 of 2 on node2"]
    assert places(run, 1) == ["0 of 3 on node1", "1 of 3 on node2", "2 of 3 on node0"]
    all_gone(sshd)


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
def test_a_host_that_comes_back_at_the_end_is_not_waited_for(
    make_sshd: MakeSshd, tmp_path: Path
) -> None:
    """Its launcher would wait for node 0, which has ended."""
    sshd = make_sshd(2)
    words = ("--nnodes", "1:2", "--export", "PYTHONPATH", "--nproc-per-node", "1")
    run = launch(sshd, *words, TICKS, tmp_path)
    run.wait_for("tick 3\n", times=2)
    os.kill(pids_of(sshd, 1, "meshrun agent")[-1], signal.SIGKILL)
    run.wait_for("host node1 is back")
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
    assert "waiting for node 0" not in run.text
    all_gone(sshd)


@pytest.mark.nightly
def test_too_few_hosts(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """Nothing starts, and every unusable host is named."""
    sshd = make_sshd(2)
    run = start(sshd, tmp_path, nnodes="3:4", hosts="node0,node1,nowhere1,nowhere2")

    assert run.end() == 69
    assert "error: cannot use 2 of 4 hosts, but 3 are required" in run.text
    assert "nowhere1: ssh failed" in run.text
    assert " in 0 on " not in run.text


@pytest.mark.nightly
def test_the_other_hosts_restart_without_the_first(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """It hosts the stores, so every running rank ends; no process is left."""
    sshd = make_sshd(3)
    run = start(sshd, tmp_path, nnodes="1:2", hosts="node1,node2")
    run.wait_for(" in 0 on ", times=2)
    sshd.hosts.kill_all(1)
    run.wait_for("restarting with the remaining hosts")
    run.wait_for(" in 0 on ", times=3)
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
    assert lost_host("node1") in run.text
    assert places(run, 0) == ["0 of 1 on node2", "0 of 2 on node1", "1 of 2 on node2"]
    all_gone(sshd)
    again = Launch(sshd.hosts, 1, ["--mesh", "dp=1", SAYS])  # clears up after the dead host
    assert again.end() == 0


@pytest.mark.nightly
def test_hosts_beyond_the_maximum_are_spares(make_sshd: MakeSshd, tmp_path: Path) -> None:
    """A spare replaces a host that is cut off."""
    sshd = make_sshd(3)
    run = start(sshd, tmp_path, nnodes="1:2")
    run.wait_for(" in 0 on ", times=2)
    run.wait_for("node2 is a spare")
    sshd.hosts.cut(1)
    run.wait_for(" in 1 on ", times=2)
    (tmp_path / "go").touch()

    assert run.end() == 0, run.text
    assert places(run, 1) == ["0 of 2 on node0", "1 of 2 on node2"]


@pytest.mark.nightly
@pytest.mark.parametrize("bad", [0, 1])
def test_a_host_that_is_excluded_is_not_tried_again(
    make_sshd: MakeSshd, tmp_path: Path, bad: int
) -> None:
    """The others continue without it, or start over if it was the first host."""
    sshd = make_sshd(2)
    history, broken = tmp_path / "history", "x" * 3
    line = {"time": time.time(), "host": f"node{bad}", "run_id": "1", "reason": broken}
    history.write_text(f"{json.dumps(line)}\n" * 2)
    (tmp_path / "go").touch()
    run = start(
        *(sshd, tmp_path, "--node-history", str(history), "--max-node-failures", "1"),
        nnodes="1:2",
        here=1 - bad,
    )
    assert run.end() == 0, run.text
    why = f"node{bad} failed 2 times in 1 job in the last 30 days, most recently: {broken}"
    assert f"host node{bad}" in run.text
    assert f"{why}; --max-node-failures is 1" in run.text
    assert places(run, 0) == [f"0 of 1 on node{1 - bad}"]
    all_gone(sshd)
