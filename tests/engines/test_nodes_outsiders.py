"""An outsider on the nodes' network: what it can do, and what it cannot."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, end_all, wait_for_all
from tests.kit import NOT_A_LAUNCHER, OF_ANOTHER_LAUNCH, PROGRAMS, wait_until

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
TOGETHER = PROGRAMS / "together.py"
MEDDLE = PROGRAMS / "meddle.py"
AT = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=2,tp=2")
HEAD = ("10.77.0.1", "29500")
STRANGER = 2


def listens(hosts: Hosts, host: int) -> bool:
    """Whether the coordinator listens on its port."""
    return "10.77.0.1:29500" in hosts.run(host, ["ss", "-ltn"]).stdout


@pytest.mark.nightly
def test_an_outsider_that_connects_keeps_no_node_out(make_hosts: MakeHosts) -> None:
    """It sends garbage or nothing, some connections for the whole launch."""
    hosts = make_hosts(3)
    first = Launch(hosts, 0, [*AT, SAYS])
    wait_until(lambda: listens(hosts, 0), lambda: first.text)
    outsider = hosts.popen(
        STRANGER, [sys.executable, MEDDLE, "knock", *HEAD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert outsider.stdout is not None
    assert outsider.stdout.readline() == "knocked\n"
    second = Launch(hosts, 1, [*AT, SAYS])

    assert end_all([first, second]) == [0, 0], first.text + second.text
    rejected = f"10.77.0.3 was rejected: {NOT_A_LAUNCHER}"
    assert first.text.count(rejected) == 1
    outsider.communicate()


@pytest.mark.usefixtures("fake_torch")
def test_a_launcher_without_the_secret_is_rejected(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """It runs the same command with another secret or none; the launch goes on without it."""
    hosts = make_hosts(3)
    words = (*AT[:4], "--nproc-per-node", "1", PROGRAMS / "echo.py")
    path = tmp_path / "secret"
    path.write_text("of this job")
    path.chmod(0o600)
    first = Launch(hosts, 0, words, env={"MESHRUN_SECRET": "of this job"})
    wait_until(lambda: listens(hosts, 0), lambda: first.text)
    unauthenticated = [
        Launch(hosts, STRANGER, ["--rdzv-conf", "join_timeout=3", *words], env=env)
        for env in ({}, {"MESHRUN_SECRET": "guessed"})
    ]
    first.wait_for(f"10.77.0.3 was rejected: {OF_ANOTHER_LAUNCH}")
    second = Launch(hosts, 1, words, env={"MESHRUN_SECRET_FILE": str(path)})

    assert end_all([first, second]) == [0, 0], first.text + second.text
    assert ("out 0" in first.text, "out 1" in second.text) == (True, True)
    assert end_all(unauthenticated) == [69, 69]
    assert "has a different secret" in unauthenticated[0].text


@pytest.mark.nightly
def test_without_a_secret_the_command_is_all_it_takes(make_hosts: MakeHosts) -> None:
    """Whoever runs it first becomes the node, and the intended host is too late."""
    hosts = make_hosts(3)
    launches = [Launch(hosts, host, [*AT, SAYS]) for host in (0, STRANGER)]

    assert end_all(launches) == [0, 0], launches[0].text
    assert "rank 3 of 4 on node2" in launches[1].text


@pytest.mark.nightly
def test_a_coordinator_without_the_secret_is_not_obeyed(make_hosts: MakeHosts) -> None:
    """An outsider who listens in its place gets no participants."""
    hosts = make_hosts(2)
    coordinator = Launch(hosts, 0, [*AT, "--rdzv-conf", "join_timeout=6", SAYS])
    participant = Launch(
        hosts, 1, [*AT, "--rdzv-conf", "join_timeout=6", SAYS], env={"MESHRUN_SECRET": "x"}
    )

    assert end_all([coordinator, participant]) == [69, 69]
    assert "rank " not in coordinator.text + participant.text


@pytest.mark.nightly
def test_writing_to_the_store_ends_nothing(make_hosts: MakeHosts) -> None:
    """The store accepts only the launch's nodes, and does not decide whether ranks run or end."""
    hosts = make_hosts(3)
    launches = [Launch(hosts, host, [*AT, TOGETHER, "save", "stay"]) for host in (0, 1)]
    wait_for_all(launches, "met 4", times=2)
    store = ("10.77.0.1", store_port(hosts))
    reached = hosts.run(STRANGER, [sys.executable, MEDDLE, "reach", *store])
    assert reached.stdout == "not reached\n", reached.stderr
    meddled = hosts.run(1, [sys.executable, MEDDLE, "store", *store])
    assert meddled.stdout == "read back 1\n", meddled.stderr
    launches[0].send(signal.SIGTERM)

    assert end_all(launches) == [75, 75], launches[0].text + launches[1].text


@pytest.mark.nightly
def test_a_node_reaches_the_store_from_each_of_its_addresses(make_hosts: MakeHosts) -> None:
    """With IPv6 it may have temporary addresses, and the kernel chooses among them."""
    hosts = make_hosts(3, ipv6=True)
    hosts.run(1, ["ip", "-6", "address", "add", "fd77::22/64", "dev", "eth0", "nodad"])
    words = ["--nnodes", "2", "--rdzv-endpoint", "[fd77::1]:29500", "--mesh", "dp=2,tp=2"]
    launches = [Launch(hosts, host, [*words, TOGETHER, "stay"]) for host in (0, 1)]
    wait_for_all(launches, "met 4", times=2)
    reach = [sys.executable, MEDDLE, "reach", "fd77::1", store_port(hosts)]
    reached = [hosts.run(1, [*reach, own]).stdout for own in ("fd77::2", "fd77::22")]
    outsider = hosts.run(STRANGER, reach).stdout
    launches[0].send(signal.SIGTERM)

    assert (reached, outsider) == (["reached\n"] * 2, "not reached\n")
    assert end_all(launches) == [-15, 143], launches[0].text + launches[1].text


def store_port(hosts: Hosts) -> str:
    """Return the port on which two processes of the first host listen: launcher and store."""
    found = hosts.run(0, ["ss", "-ltnpH"]).stdout
    (port,) = (
        line.split()[3].rpartition(":")[2]
        for line in found.splitlines()
        if line.count("pid=") == 2 and ":29500 " not in line
    )
    return port


@pytest.mark.nightly
@pytest.mark.parametrize("ipv6", [False, True])
def test_a_program_reaches_the_store_by_itself(make_hosts: MakeHosts, ipv6: bool) -> None:
    """By the variables or by its address, on every node, although outsiders are kept out."""
    hosts = make_hosts(2, ipv6=ipv6)
    at = ("[fd77::1]" if ipv6 else "10.77.0.1") + ":29500"
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--device", "cpu", "--rdzv-endpoint", at]
    launches = [Launch(hosts, host, [*words, PROGRAMS / "own_groups.py"]) for host in (0, 1)]

    assert end_all(launches) == [0, 0], launches[0].text + launches[1].text
    for launch in launches:
        assert launch.text.count("met through env") == launch.text.count("met through tcp") == 2


@pytest.mark.nightly
def test_torchs_store_is_gone_once_nodes_have_joined(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """No outsider can write to it any more, and a further node of an elastic launch can join."""
    hosts = make_hosts(3)
    words = ["--nnodes", "1:2", "--nproc-per-node", "1", "--mesh", "dp=1:2", "--rdzv-backend",
             "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-conf", "last_call_timeout=1",
             PROGRAMS / "elastic.py", tmp_path]  # fmt: skip
    first = Launch(hosts, 0, words)
    first.wait_for("in 0 on")
    junk = hosts.run(STRANGER, [sys.executable, MEDDLE, "junk", *HEAD])
    assert junk.stdout == ""
    second = Launch(hosts, 1, words)
    second.wait_for("in 1 on")
    (tmp_path / "go").touch()

    assert end_all([first, second]) == [0, 0], first.text + second.text


def test_launches_listen_only_on_addresses_that_peers_use(make_hosts: MakeHosts) -> None:
    """Store, gloo and launchers listen only on the address by which the nodes reach each other."""
    hosts = make_hosts(2)
    launches = [Launch(hosts, host, [*AT, TOGETHER, "save", "stay"]) for host in (0, 1)]
    wait_for_all(launches, "met 4", times=2)
    found = [hosts.run(host, ["ss", "-ltnH"]).stdout for host in (0, 1)]
    launches[0].send(signal.SIGTERM)
    end_all(launches)
    places = [set(re.findall(r"LISTEN\s+\d+\s+\d+\s+(\S+):\d+", text)) for text in found]

    assert places == [{"10.77.0.1"}, {"10.77.0.2"}], found
