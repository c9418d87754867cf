"""Nodes join and leave during a launch: the mesh is resized and the ranks restart."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, all_gone, as_shell, end_all, wait_for_all
from tests.kit import LOST_PEER, PROGRAMS, SILENT, ZYGOTE, lost_node, ranks_below, withdrew

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = PROGRAMS / "elastic.py"


def start(
    hosts: Hosts, host: int, folder: Path, *more: str, nnodes: str = "1:4",
    mesh: str = "dp=1:8,tp=2", workers: int = 1, conf: str = "last_call_timeout=4", **kwargs: Any,
) -> Launch:  # fmt: skip
    """Start the launcher of one node."""
    return Launch(
        hosts, host,
        ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400",
         "--rdzv-id", "j", "--rdzv-conf", conf, "--nproc-per-node", str(workers), "--mesh", mesh,
         "--node-timeout", "3", *more, PROGRAM, str(folder)],
        **kwargs,
    )  # fmt: skip


def start_all(hosts: Hosts, count: int, folder: Path, *more: str, **kwargs: Any) -> list[Launch]:
    """Start the launchers of the first ``count`` nodes and wait until their ranks run."""
    launches = [start(hosts, host, folder, *more, **kwargs) for host in range(count)]
    wait_for_all(launches, "in 0 on")
    return launches


def ranks(launch: Launch, generation: int) -> list[str]:
    """Return the lines of one generation's ranks on one node."""
    lines = (line.partition("] ")[2] for line in launch.text.splitlines())
    return sorted(line for line in lines if f" in {generation} on " in line)


@pytest.mark.nightly
def test_a_launch_goes_on_without_a_lost_node(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """The others restart with a smaller mesh, keep their order, and know the previous mesh."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 3, tmp_path, mesh="dp=1:8,tp=1", nnodes="2:3")
    os.kill(launches[1].process.pid, signal.SIGKILL)
    wait_for_all(launches[::2], "in 1 on", "generation 1 runs without node1: dp 3 -> 2")
    (tmp_path / "go").touch()

    assert end_all([launches[0], launches[2]]) == [0, 0], launches[0].text
    assert ranks(launches[0], 1) == ["rank 0 of 2 in 1 on node0 node 0 after dp=3,tp=1 of 0"]
    assert ranks(launches[2], 1) == ["rank 1 of 2 in 1 on node2 node 1 after dp=3,tp=1 of 0"]
    all_gone(hosts)


@pytest.mark.nightly
def test_an_option_that_no_longer_fits_ends_the_launch(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Every node finds the error in the next generation, and they end together.

    What the ranks of the generation before have answered, by other numbers, is not reported.
    """
    hosts = make_hosts(3)
    more = ("--show", "rank=2")
    launches = [
        start(hosts, host, tmp_path, *more, mesh="dp=1:8,tp=1", nnodes="2:3") for host in range(3)
    ]
    launches[2].wait_for("in 0 on")
    lost = launches[1].process.pid
    os.kill(lost, signal.SIGSTOP)
    ranks_below(lost)[0].kill()
    launches[2].wait_for("lost a connection")
    os.kill(lost, signal.SIGKILL)

    assert end_all([launches[0], launches[2]]) == [2, 2]
    assert "no rank 2 in a world of 2" in launches[0].text
    all_gone(hosts)


def test_a_node_that_comes_later_joins(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """The mesh grows at its end, and the new node knows the previous generation and mesh."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 2, tmp_path, mesh="dp=1:8,tp=1")
    launches.append(start(hosts, 2, tmp_path, mesh="dp=1:8,tp=1"))
    wait_for_all(launches, "generation 1 runs with node2: dp 2 -> 3")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0, 0], launches[2].text
    assert "node2 joins: dp 2 -> 3; stopping the rank on this node" in launches[0].text
    stopped = "node2 joins: dp 2 -> 3; stopping the rank on this node"
    lost_peer = f"rank 1 [dp1 tp0] {LOST_PEER}"  # if it is stopped later
    assert stopped in launches[1].text or lost_peer in launches[1].text, launches[1].text
    assert ranks(launches[1], 1) == ["rank 1 of 3 in 1 on node1 node 1 after dp=2,tp=1 of 0"]
    assert ranks(launches[2], 1) == ["rank 2 of 3 in 1 on node2 node 2 after dp=2,tp=1 of 0"]
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fails", "what", "code"),
    [
        ("sys.exit(3)", "rank 1 exited with code 3", 71),
        pytest.param(
            *("os.kill(os.getppid(), 9); time.sleep(60)", ZYGOTE, 137),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_host_on_which_every_start_fails_is_left_out(
    make_hosts: MakeHosts, tmp_path: Path, fails: str, what: str, code: int
) -> None:
    """After two failures, of a rank or a zygote; a spare replaces it, and restarts are left."""
    hosts = make_hosts(4)
    program = tmp_path / "broken_host.py"
    program.write_text(
        "import os, sys, time\n"
        "host = os.uname().nodename\n"
        "print('runs on', host, flush=True)\n"
        "while host != 'node1' and not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.02)\n"
        f"if host == 'node1': {fails}\n"
    )
    words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400",
             "--max-restarts", "5", "--mesh", "dp=2", program, tmp_path / "go"]  # fmt: skip
    first, lost = Launch(hosts, 0, words), Launch(hosts, 2, words)
    first.wait_for("runs on")
    spares = []
    for host in (1, 3):
        spares.append(Launch(hosts, host, words))
        spares[-1].wait_for("this node is a spare")
    lost.process.kill()
    spares[1].wait_for("runs on node3")
    (tmp_path / "go").touch()

    why = f"the last two failures were on node1 and on no other node: {what}"
    assert end_all([first, *spares]) == [0, code, 0], first.text
    assert re.search(f"{why}.*; excluding it", first.text), first.text
    assert re.search(
        f"error: ({why}.*; the other nodes continue without it|on node1, {what})", spares[0].text
    )
    assert spares[0].text.count("runs on node1") == 2
    lost.end()
    all_gone(hosts)


@pytest.mark.nightly
def test_growth_needs_no_process_but_the_launcher(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """After the rendezvous it listens at c10d's endpoint itself; torch's store has ended."""
    hosts = make_hosts(2)
    first = start(hosts, 0, tmp_path, mesh="dp=1:8,tp=1")
    first.wait_for("in 0 on")
    assert listening(hosts, "29400") == {first.process.pid}
    second = start(hosts, 1, tmp_path, mesh="dp=1:8,tp=1")
    wait_for_all((first, second), "generation 1 runs with node1: dp 1 -> 2")
    (tmp_path / "go").touch()

    assert end_all([first, second]) == [0, 0], second.text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize(("restarts", "codes"), [("0", [137, 137]), ("1", [0, 0, 0])])
def test_a_zygote_that_is_killed_while_nodes_are_awaited(
    make_hosts: MakeHosts, tmp_path: Path, restarts: str, codes: list[int]
) -> None:
    """It is replaced or ends the launch; nodes do not need it to meet."""
    hosts = make_hosts(3)
    more = ("--max-restarts", restarts)
    launches = [start(hosts, host, tmp_path, *more, nnodes="3:4") for host in range(2)]
    wait_for_all(launches, "2 of at least 3 nodes joined")
    (zygote,) = psutil.Process(launches[0].process.pid).children()
    zygote.kill()
    if restarts == "1":
        launches.append(start(hosts, 2, tmp_path, *more, nnodes="3:4"))
    (tmp_path / "go").touch()

    assert [as_shell(each) for each in end_all(launches)] == codes, launches[0].text
    if restarts == "0":
        why = f"{ZYGOTE} was killed by SIGKILL"
        assert f"error: {withdrew('node0')}{why}" in launches[1].text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_zygote_that_is_stopped_is_replaced_when_a_node_joins(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """It cannot end its ranks when the nodes change, so all nodes would wait for it."""
    hosts = make_hosts(2)
    more, conf = ("--shutdown-timeout", "1"), {"mesh": "dp=1:8,tp=1", "conf": "last_call_timeout=0"}
    launches = [start(hosts, 0, tmp_path, *more, **conf)]
    launches[0].wait_for("in 0 on")
    (zygote,) = psutil.Process(launches[0].process.pid).children()
    zygote.suspend()
    launches.append(start(hosts, 1, tmp_path, *more, **conf))
    wait_for_all(launches, "generation 1 runs with node1: dp 1 -> 2")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text
    assert ranks(launches[0], 1) == ["rank 0 of 2 in 1 on node0 node 0 after dp=1,tp=1 of 0"]
    all_gone(hosts)


def listening(hosts: Hosts, port: str) -> set[int]:
    """Return the processes of the first host that listen on a port."""
    found = hosts.run(0, ["ss", "-ltnpH", f"sport = :{port}"]).stdout
    return {int(pid) for pid in re.findall(r"pid=(\d+)", found)}


@pytest.mark.nightly
def test_a_spare_takes_the_place_of_a_lost_node(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """It waits quietly with its zygote ready; the mesh and the other ranks' numbers stay."""
    hosts = make_hosts(3)
    mesh = "dp=2,tp=1"
    launches = start_all(hosts, 2, tmp_path, mesh=mesh, nnodes="1:2")
    launches.append(start(hosts, 2, tmp_path, mesh=mesh, nnodes="1:2"))
    launches[2].wait_for("this node is a spare")
    os.kill(launches[1].process.pid, signal.SIGKILL)
    wait_for_all(launches[::2], "1 runs without node1 and with node2: dp=2,tp=1 as before")
    (tmp_path / "go").touch()

    assert end_all([launches[0], launches[2]]) == [0, 0], launches[2].text
    assert ranks(launches[2], 1) == ["rank 1 of 2 in 1 on node2 node 1 after dp=2,tp=1 of 0"]
    assert launches[0].text.count("spare") == 1
    all_gone(hosts)


@pytest.mark.nightly
def test_a_spare_ends_with_the_others(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Even if the mesh cannot use it: dp=1:8,tp=2 takes two of three nodes with one worker each."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 2, tmp_path, nnodes="2:4")
    launches.append(start(hosts, 2, tmp_path, nnodes="2:4"))
    launches[2].wait_for("this node is a spare")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0, 0], launches[2].text
    assert "joins" not in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_too_few_nodes_are_waited_for(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Below MIN the launch waits, reports it, and goes on with the nodes that join."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 2, tmp_path, nnodes="2:4")
    os.kill(launches[1].process.pid, signal.SIGKILL)
    launches[0].wait_for("1 of at least 2 nodes joined (node0)")
    launches[1] = start(hosts, 2, tmp_path, nnodes="2:4")
    for launch in launches[:2]:
        launch.wait_for("generation 1 runs without node1 and with node2")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_too_few_nodes_for_too_long_are_an_error(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """With the list of those that have joined."""
    hosts = make_hosts(2)
    conf = "last_call_timeout=4,join_timeout=20"
    launches = start_all(hosts, 2, tmp_path, nnodes="2:4", conf=conf)
    os.kill(launches[1].process.pid, signal.SIGKILL)

    assert launches[0].end() == 69, launches[0].text
    assert " s, 1 of at least 2 nodes joined (node0)\n" in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_the_loss_of_the_first_node_ends_the_launch(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """It is the coordinator and hosts the store; all other nodes report its loss."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 3, tmp_path, mesh="dp=1:8,tp=1")
    os.kill(launches[0].process.pid, signal.SIGKILL)

    assert end_all(launches[1:]) == [69, 69], launches[1].text
    for launch in launches[1:]:
        assert f"error: {lost_node(0)}" in launch.text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_node_that_was_cut_off_rejoins(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """The others go on without it; it stops its ranks and rejoins when the link is back."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 3, tmp_path, mesh="dp=1:8,tp=1")
    hosts.cut(1)
    launches[2].wait_for("generation 1 runs without node1: dp 3 -> 2")
    launches[1].wait_for("reconnecting to node 0")
    hosts.heal(1)
    wait_for_all(launches, "generation 2 runs with node1: dp 2 -> 3")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0, 0], launches[1].text
    assert f"{lost_node(0)}{SILENT}" in launches[1].text
    assert ranks(launches[1], 2) == ["rank 2 of 3 in 2 on node1 node 2 after dp=2,tp=1 of 1"]
    assert ranks(launches[2], 2) == ["rank 1 of 3 in 2 on node2 node 1 after dp=2,tp=1 of 1"]
    all_gone(hosts)


@pytest.mark.nightly
def test_a_node_that_stays_cut_off_gives_up(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """After join_timeout."""
    hosts = make_hosts(2)
    conf = "last_call_timeout=4,join_timeout=15"
    launches = start_all(hosts, 2, tmp_path, mesh="dp=1:8,tp=1", conf=conf)
    hosts.cut(1)

    assert launches[1].end() == 69, launches[1].text
    launches[0].wait_for("generation 1 runs without node1: dp 2 -> 1")
    (tmp_path / "go").touch()
    assert launches[0].end() == 0
    hosts.heal(1)
    all_gone(hosts)


@pytest.mark.nightly
def test_a_latecomer_with_another_setting_is_rejected(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """The running launch is not disturbed."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 2, tmp_path, mesh="dp=1:8,tp=1")
    other = start(hosts, 2, tmp_path, mesh="dp=1:4,tp=1")

    assert other.end() == 2, other.text
    assert "error: --mesh is dp=1:4,tp=1 on node2, but dp=1:8,tp=1 on node0" in other.text
    (tmp_path / "go").touch()
    assert end_all(launches) == [0, 0]
    assert "in 1 on" not in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_change_of_nodes_is_no_restart(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """A failed rank counts against --max-restarts and keeps the nodes; a lost node does neither."""
    hosts = make_hosts(2)
    report = tmp_path / "report.json"
    more = ("--max-restarts", "1", "--report", str(report))
    launches = start_all(hosts, 2, tmp_path, *more, mesh="dp=1:8,tp=1")
    (tmp_path / "raise").touch()
    wait_for_all(launches, "in 1 on")
    assert "restart 1 of 1, because rank 0 [dp0 tp0] raised ValueError" in launches[1].text
    os.kill(launches[1].process.pid, signal.SIGKILL)
    launches[0].wait_for("in 2 on")
    (tmp_path / "raise").touch()

    assert launches[0].end() == 1, launches[0].text
    assert ranks(launches[0], 2) == ["rank 0 of 1 in 2 on node0 node 0 after dp=2,tp=1 of 1"]
    written = json.loads(report.read_text())
    assert written["restarts"] == 1
    assert [(each["generation"], each["left"], each["shapes"]) for each in written["resizes"]] == [
        (2, ["node1"], "dp 2 -> 1")
    ]
    all_gone(hosts)


@pytest.mark.nightly
def test_a_spare_may_leave(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """A signal to a spare ends only the spare."""
    hosts = make_hosts(3)
    launches = start_all(hosts, 2, tmp_path, nnodes="2:4")
    spare = start(hosts, 2, tmp_path, nnodes="2:4")
    spare.wait_for("this node is a spare")
    spare.send(signal.SIGTERM)
    assert as_shell(spare.end()) == 143, spare.text
    launches[0].wait_for("lost spare node node2")
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text
    assert "in 1 on" not in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_a_signal_ends_a_launch_that_waits_for_nodes(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """At once, with the signal's exit code."""
    hosts = make_hosts(2)
    launches = start_all(hosts, 2, tmp_path, nnodes="2:4")
    os.kill(launches[1].process.pid, signal.SIGKILL)
    launches[0].wait_for("1 of at least 2 nodes joined (node0)")
    launches[0].send(signal.SIGTERM)

    assert as_shell(launches[0].end()) == 143, launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
def test_output_follows_the_number_of_ranks(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Collapsed lines, status, stacks and files name the current ranks."""
    hosts = make_hosts(3)
    logs = tmp_path / "logs"
    more = ["--collapse", "--status", "--status-interval", "0.2", "--log-dir", str(logs)]
    more += ["--tee", "3"]
    launches = [
        start(hosts, host, tmp_path, *more, mesh="dp=1:8,tp=2", workers=2) for host in range(3)
    ]
    wait_for_all(launches, "in 0 on", times=2)
    launches[2].send(signal.SIGQUIT)
    os.kill(launches[1].process.pid, signal.SIGKILL)
    for launch in launches[::2]:
        launch.wait_for("generation 1 runs without node1: dp 3 -> 2")
        launch.wait_for("in 1 on", times=2)
    launches[2].send(signal.SIGQUIT)
    launches[2].wait_for("elastic.py")
    (tmp_path / "go").touch()

    assert end_all([launches[0], launches[2]]) == [0, 0], launches[2].text
    assert [line.partition(" in ")[0] for line in ranks(launches[2], 1)] == [
        "rank 2 of 4",
        "rank 3 of 4",
    ]
    assert list(logs.glob("*node2*/**/stdout.log"))
    all_gone(hosts)


@pytest.mark.nightly
def test_a_preempted_machine_leaves_alone(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """SIGTERM on a node other than the first ends its ranks; the others go on without it."""
    hosts = make_hosts(2)
    launches = start_all(hosts, 2, tmp_path, nnodes="1:2", mesh="dp=1:8,tp=1")
    launches[1].send(signal.SIGTERM)
    assert as_shell(launches[1].end()) == 143, launches[1].text
    launches[0].wait_for("generation 1 runs without node1: dp 2 -> 1")
    (tmp_path / "go").touch()

    assert launches[0].end() == 0, launches[0].text
    assert f"{lost_node(1)}it was stopped by SIGTERM" in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_a_node_that_cannot_import_torch(
    make_hosts: MakeHosts, tmp_path: Path, nnodes: str
) -> None:
    """Found after all nodes have joined, it ends the launch, and every node names the node."""
    hosts = make_hosts(2)
    torch = tmp_path / "broken" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(
        "import os, time\n"
        f"while not os.path.exists({str(tmp_path / 'met')!r}):\n"
        "    time.sleep(0.02)\n"
        "raise ImportError('libtorch.so is missing')\n"
    )
    words = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400",
             "--nproc-per-node", "1", "--mesh", f"dp={nnodes},tp=1", "--verbose",
             PROGRAMS / "nodes.py"]  # fmt: skip
    around = ["env", f"PYTHONPATH={torch.parent}"]
    launches = [Launch(hosts, 0, words), Launch(hosts, 1, words, around=around)]
    launches[1].wait_for("listening: nothing else")  # printed once all nodes have joined
    (tmp_path / "met").touch()

    assert end_all(launches) == [1, 1], launches[0].text
    assert "error: on node1, ImportError: libtorch.so is missing" in launches[0].text
    assert "ImportError: libtorch.so is missing\n" in launches[1].text
    all_gone(hosts)
