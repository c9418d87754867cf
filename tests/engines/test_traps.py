"""What goes wrong between machines: cuts, silence, clocks, late names, wrong addresses."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, all_gone, end_all, launch_on, rank_lines, wait_for_all
from tests.kit import OF_ANOTHER_LAUNCH, PROGRAMS, SILENT, all_running, lost_node

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
TALK = PROGRAMS / "talk.py"
TOGETHER = PROGRAMS / "together.py"
MESH = ("--mesh", "dp=2,tp=2")
AT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", *MESH)


def pause(seconds: float) -> None:
    """Let a fault last for so many seconds."""
    threading.Event().wait(seconds)


def start_talking(hosts: Hosts, go: Path, *words: str) -> list[Launch]:
    """Start ranks that talk to each other until the file ``go`` exists."""
    launches = launch_on(hosts, *AT, *words, TALK, go)
    wait_for_all(launches, "talking", times=2)
    return launches


# ---- silence -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut_s", "words"),
    [
        (4, ["--node-timeout", "20"]),
        pytest.param(20, [], marks=[pytest.mark.nightly, pytest.mark.timeout(300)]),
    ],
)
def test_a_cut_that_heals_is_survived(
    make_hosts: MakeHosts, tmp_path: Path, cut_s: float, words: list[str]
) -> None:
    """By ranks that communicate all the time, and by their launchers."""
    hosts = make_hosts(2)
    launches = start_talking(hosts, tmp_path / "go", *words)
    hosts.cut(1)
    pause(cut_s)
    hosts.heal(1)
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert [launch.text.count("done") for launch in launches] == [2, 2]


@pytest.mark.nightly
def test_connections_that_are_reset_are_resumed(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Each time, while ranks communicate on other connections."""
    hosts = make_hosts(2)
    launches = start_talking(hosts, tmp_path / "go")
    for times in (1, 2, 3):
        hosts.reset(1, 29500)
        wait_for_all(launches, "was reset and resumed", times=times)
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


@pytest.mark.nightly
@pytest.mark.parametrize("host", [0, 1])
def test_loss_in_one_direction_is_noticed(make_hosts: MakeHosts, host: int) -> None:
    """On both sides, though one still hears the other for a while."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--node-timeout", "4", TOGETHER, "stay")
    wait_for_all(launches, "met 4", times=2)
    hosts.lose_towards(host, 1 - host)

    assert end_all(launches) == [69, 69], launches[0].text + launches[1].text
    assert lost_node(1) in launches[0].text
    assert lost_node(0) in launches[1].text
    for launch in launches:  # the side that still hears learns it from the other
        assert SILENT in launch.text
    assert "--node-timeout" in launches[0].text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("ends", ["healed", "interrupted", "lost"])
def test_the_first_node_stays_until_others_know_the_result(
    make_hosts: MakeHosts, tmp_path: Path, ends: str
) -> None:
    """Its packets are lost from just before the end of the launch, while it still hears others."""
    hosts = make_hosts(2)
    program = tmp_path / "fails.py"
    program.write_text(
        "import os, sys, time\n"
        "print('began', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "sys.exit(3 * int(os.environ['RANK']))"
    )
    timeout = ["--node-timeout", "4" if ends == "lost" else "40"]
    launches = launch_on(
        hosts, *AT[:4], *timeout, "--nproc-per-node", "1", program, tmp_path / "go"
    )
    wait_for_all(launches, "began")
    hosts.lose_towards(0, 1)
    (tmp_path / "go").touch()
    launches[1].wait_for("rank 1 exited with code 3")
    if ends != "lost":
        pause(6)
        assert launches[0].process.poll() is None, launches[0].text
    if ends == "interrupted":
        launches[0].send(signal.SIGINT)
        launches[0].end()
    if ends != "lost":
        hosts.deliver_towards(0, 1)

    codes = end_all(launches)
    assert codes[0] == 3, launches[0].text
    if ends != "interrupted":  # after that, whichever packet comes first decides
        assert codes[1] == (3 if ends == "healed" else 69), launches[1].text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_stands_still_for_a_moment_loses_no_node(
    make_hosts: MakeHosts, tmp_path: Path, host: int
) -> None:
    """It is stopped for less than --node-timeout, as by a slow disk; its ranks go on."""
    hosts = make_hosts(2)
    launches = start_talking(hosts, tmp_path / "go", "--node-timeout", "20")
    launches[host].send(signal.SIGSTOP)
    pause(3)
    launches[host].send(signal.SIGCONT)
    (tmp_path / "go").touch()

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


@pytest.mark.nightly
@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_stands_still_for_long_is_lost(make_hosts: MakeHosts, host: int) -> None:
    """The other node exits; the stopped launcher, once resumed, finds this out and exits too."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *AT, "--node-timeout", "3", TOGETHER, "stay")
    wait_for_all(launches, "met 4", times=2)
    stopped, other = launches[host], launches[1 - host]
    stopped.send(signal.SIGSTOP)

    assert other.end() == 69
    assert f"{lost_node(host)}{SILENT}" in other.text
    stopped.send(signal.SIGCONT)
    assert stopped.end() == 69, stopped.text
    assert lost_node(1 - host) in stopped.text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize("known_as", [[], ["10.88.0.1", "10.77.0.1"]], ids=["debian", "both"])
def test_a_first_node_with_two_networks(
    make_hosts: MakeHosts, known_as: list[str], backend: str
) -> None:
    """The other nodes reach it on one of them only, and its default route leads to the other."""
    hosts = make_hosts(2, own_name="nothing" if known_as else "loopback")
    for words in ("addr add 10.88.0.1/24 dev eth0", "route add default via 10.88.0.9"):
        done = hosts.run(0, ["ip", *words.split()])
        assert done.returncode == 0, done.stderr
    for address in known_as:
        for host in (0, 1):
            hosts.add_name(host, "node0", address)
    words = ["--rdzv-backend", backend, "--rdzv-conf", "join_timeout=20", *AT, SAYS]
    launches = [Launch(hosts, host, words) for host in (0, 1)]

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert len(rank_lines(launches[0].text + launches[1].text)) == 4


# ---- when nodes start ----------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("first", [0, 1])
def test_nodes_may_come_late(make_hosts: MakeHosts, first: int, backend: str) -> None:
    """The coordinator or the other node starts only after the first has reported that it waits."""
    hosts = make_hosts(2)
    words = ["--rdzv-backend", backend, *AT, SAYS]
    early = Launch(hosts, first, words)
    early.wait_for("waiting ")
    late = Launch(hosts, 1 - first, words)

    assert end_all([early, late]) == [0, 0], early.text + late.text
    assert len(rank_lines(early.text + late.text)) == 4


@pytest.mark.nightly
def test_a_node_that_dies_while_others_are_awaited_may_come_back(make_hosts: MakeHosts) -> None:
    """The coordinator drops it and accepts its replacement."""
    hosts = make_hosts(3)
    words = ["--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3", SAYS]
    coordinator, died = (Launch(hosts, host, words) for host in (0, 1))
    coordinator.wait_for("2 of 3 nodes joined")
    died.send(signal.SIGKILL)
    coordinator.wait_for(
        "1 of 3 nodes joined", times=coordinator.text.count("1 of 3 nodes joined") + 1
    )
    others = [Launch(hosts, host, words) for host in (1, 2)]

    assert end_all([coordinator, died, *others]) == [0, -signal.SIGKILL, 0, 0], coordinator.text
    assert rank_lines(coordinator.text) == ["rank 0 of 3 on node0: dp 0, sum 3"]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_name_may_come_late(make_hosts: MakeHosts, backend: str) -> None:
    """As for pods: the name is looked up again until it resolves, on the coordinator too."""
    hosts = make_hosts(2)
    launches = launch_on(
        hosts, "--nnodes", "2", "--rdzv-backend", backend,
        "--rdzv-endpoint", "job-0.service:29500", *MESH, SAYS,
    )  # fmt: skip
    wait_for_all(launches, "waiting ")
    for host in (1, 0):
        hosts.add_name(host, "job-0.service", hosts.addresses[0])

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    assert [len(rank_lines(launch.text)) for launch in launches] == [2, 2]


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.nightly)])
def test_one_node_too_many_is_rejected(
    make_hosts: MakeHosts, backend: str, request: pytest.FixtureRequest
) -> None:
    """It is told that all are running, where torch's rendezvous would keep it waiting."""
    if backend == "static":
        request.getfixturevalue("fake_torch")
    hosts = make_hosts(3)
    words = ["--rdzv-backend", backend, *AT[:4], "--nproc-per-node", "1", PROGRAMS / "wait.py"]
    launches = [Launch(hosts, host, words) for host in (0, 1)]
    wait_for_all(launches, "up")
    late = Launch(hosts, 2, words)

    assert late.end() == 2, late.text
    assert f"error: {all_running('node0', 'node1')}" in late.text
    assert [launch.process.poll() for launch in launches] == [None, None]
    launches[0].send(signal.SIGTERM)
    assert end_all(launches) == [-signal.SIGTERM, 143], launches[0].text + launches[1].text
    all_gone(hosts)


# ---- wrong addresses -----------------------------------------------------------------------

# A node's words, with its number for N; its exit code; and what nodes 0 and 1 say.
PORTS = (["--rdzv-endpoint", "node0:2950N"], 69, ["1 of 2 nodes joined"],
         ["node0:29501", "Connection refused"])  # fmt: skip
MISTAKES: dict[str, tuple[list[str], int, list[str], list[str]]] = {
    # Only one has the endpoint's address; each names both, and neither waits.
    "both first": (["--node-rank", "0"], 2, ["error: node0 and node1 are both node 0"],
                   ["error: node0 and node1 are both node 0", "it listens on 0.0.0.0"]),
    # The launch that the other contacts keeps waiting.
    "launches": (["--rdzv-id", "jobN"], 69,
                 [f"10.77.0.2 was rejected: {OF_ANOTHER_LAUNCH}"],
                 [OF_ANOTHER_LAUNCH]),
    "endpoint": (["--rdzv-endpoint", "node1:29500", "--node-rank", "N"], 69,
                 ["node1:29500 is not an address of node0"],
                 ["10.77.0.2 is an address of this machine, which is not node 0"]),
    "ports": PORTS,
    "ports, c10d": (["--rdzv-backend", "c10d", *PORTS[0]], *PORTS[1:]),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_nodes_that_cannot_meet_each_say_why(
    make_hosts: MakeHosts, mistake: str, request: pytest.FixtureRequest
) -> None:
    """From its side, if both nodes are started with words that contradict each other."""
    words, code, *said = MISTAKES[mistake]
    if "c10d" not in words:
        request.getfixturevalue("fake_torch")
    launches = launch_on(
        hosts := make_hosts(2), "--rdzv-conf", "join_timeout=6", SAYS,
        each=lambda host: [*AT, *(word.replace("N", str(host)) for word in words)],
    )  # fmt: skip

    assert end_all(launches) == [code, code], launches[0].text + launches[1].text
    for launch, texts in zip(launches, said, strict=True):
        assert [text for text in texts if text not in launch.text] == [], launch.text
    all_gone(hosts)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_closed_firewall_is_reported(
    make_hosts: MakeHosts, backend: str, request: pytest.FixtureRequest
) -> None:
    """Packets to the coordinator are dropped without an answer."""
    if backend == "static":
        request.getfixturevalue("fake_torch")
    hosts = make_hosts(2)
    hosts.lose_towards(0, 1)  # answers do not arrive either
    launches = launch_on(
        hosts, "--rdzv-backend", backend, "--rdzv-conf", "join_timeout=9", *AT, SAYS
    )

    assert end_all(launches) == [69, 69]
    assert "1 of 2 nodes joined" in launches[0].text
    assert "check that meshrun was started" in launches[0].text or backend == "c10d"
    assert "no answer" in launches[1].text or "timed out" in launches[1].text, launches[1].text


@pytest.mark.nightly
def test_closed_ports_between_nodes_are_reported(make_hosts: MakeHosts) -> None:
    """All ports but the endpoint's are closed, so ranks would wait for each other silently."""
    hosts = make_hosts(2)
    for host in (0, 1):
        hosts.drop(host, "tcp dport != 29500 tcp flags & (syn|ack) == syn")
    launches = launch_on(hosts, "--start-timeout", "12", *AT, SAYS)
    for launch, other in zip(launches, ("node1 (10.77.0.2)", "node0 (10.77.0.1)"), strict=True):
        launch.wait_for(f"this node cannot reach {other} on port")
        launch.wait_for("no firewall blocks ports")
    for launch in launches:
        assert "no answer within 10 s; check for a firewall" in launch.text
        launch.send(signal.SIGTERM)

    end_all(launches)
    all_gone(hosts)


@pytest.mark.nightly
def test_open_ports_are_not_reported(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Each node has checked the next node's ports by the time ranks run."""
    hosts = make_hosts(3)
    words = ["--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3"]
    launches = launch_on(hosts, *words, SAYS)

    assert end_all(launches) == [0, 0, 0], launches[0].text
    assert "cannot reach" not in "".join(launch.text for launch in launches)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_link_that_loses_packets_is_survived(make_hosts: MakeHosts) -> None:
    """By launchers, beyond --node-timeout, with three of ten packets lost in both directions."""
    hosts = make_hosts(2)
    for host in (0, 1):
        hosts.drop(host, "numgen random mod 10 < 3")
    words = ["--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--node-timeout", "20"]
    launches = launch_on(hosts, *words, "--no-python", "sleep", "45")

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


# ---- clocks --------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "ahead_h"), [("static", 1), ("c10d", 1), ("c10d", -1)])
def test_an_hour_between_clocks_does_not_matter(
    make_hosts: MakeHosts, backend: str, ahead_h: int
) -> None:
    """The time of day is never compared; torch's own rendezvous would not complete."""
    hosts = make_hosts(2)
    words = ["--rdzv-backend", backend, *AT, SAYS]
    skewed = {"PYTHONPATH": str(PROGRAMS / "skewed"), "SKEW_S": str(3600 * ahead_h)}
    launches = [Launch(hosts, 0, words), Launch(hosts, 1, words, env=skewed)]

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text


@pytest.mark.nightly
def test_the_first_failure_is_found_across_clocks(make_hosts: MakeHosts) -> None:
    """The offset between the launchers' monotonic clocks is measured and used."""
    hosts = make_hosts(2)
    ahead = ["unshare", "--time", "--monotonic", "3600", "--"]
    if hosts.run(1, [*ahead, "true"]).returncode:
        pytest.skip("another monotonic clock needs time namespaces")
    words = [*AT, TOGETHER, "stay", "exit=1:7"]
    launches = [Launch(hosts, 0, words), Launch(hosts, 1, words, around=ahead)]

    assert end_all(launches) == [7, 7], launches[0].text + launches[1].text
    assert "error: rank 1 [dp0 tp1] exited with code 7" in launches[0].text
