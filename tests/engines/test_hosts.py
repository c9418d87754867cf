"""The tests' hosts are isolated and connected like machines, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.holder import network_of, processes_in
from tests.engines.hosts import Hosts, MakeHosts
from tests.kit import ROOT, wait_until

SERVE = """
import socket, sys
address = sys.argv[1]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
server = socket.socket(family); server.bind((address, 5000)); server.listen()
print("up", flush=True)
while True:
    connection, peer = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
ASK = """
import socket, sys
for word in ["hello"]:
    connection = socket.create_connection((sys.argv[1], 5000), float(sys.argv[2]))
    connection.sendall(word.encode()); print(connection.recv(100).decode(), flush=True)
"""
TALK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
for line in sys.stdin:
    connection.sendall(line.encode()); print(connection.recv(100).decode().strip(), flush=True)
"""
LOOK_UP = """
import socket
try: print(socket.gethostbyname(socket.gethostname()))
except OSError: print("nothing")
"""


def python(text: str, *args: str) -> list[str]:
    return [sys.executable, "-c", text, *args]


def serve(hosts: Hosts, host: int, address: str) -> None:
    server = hosts.popen(host, python(SERVE, address), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == "up\n"


def test_hosts_reach_each_other_by_name_and_address(make_hosts: MakeHosts) -> None:
    """Over TCP, with IPv6 as well if it is enabled."""
    hosts = make_hosts(2, ipv6=True)
    serve(hosts, 1, hosts.addresses[1])
    serve(hosts, 1, hosts.addresses_v6[1])
    places = (hosts.addresses[1], hosts.addresses_v6[1], hosts.names[1])
    found = [hosts.run(0, python(ASK, place, "30")) for place in places]

    assert [each.stdout for each in found] == ["hello\n"] * 3, found


def test_a_host_has_a_name_of_its_own(make_hosts: MakeHosts) -> None:
    """Every process on the host sees this name and counts as the host's."""
    hosts = make_hosts(3, name="gpu-")
    found = [hosts.run(host, ["hostname"]).stdout for host in range(3)]
    sleeper = hosts.popen(1, ["sleep", "1000"])
    wait_until(lambda: sleeper.pid in hosts.processes(1), lambda: "the sleeper on its host")
    others = (hosts.processes(0), hosts.processes(2))
    hosts.kill_all(1)

    assert found == ["gpu-0\n", "gpu-1\n", "gpu-2\n"]
    assert others == ([], [])
    assert sleeper.wait() == -signal.SIGKILL
    assert hosts.processes(1) == []
    assert hosts.run(1, ["hostname"]).stdout == "gpu-1\n"


@pytest.mark.parametrize(
    ("own_name", "found"),
    [("address", "10.77.0.1"), ("loopback", "127.0.1.1"), ("nothing", "nothing")],
)
def test_the_own_name_resolves_as_configured(
    make_hosts: MakeHosts, own_name: str, found: str
) -> None:
    """To its address, to Debian's loopback address, or nowhere."""
    hosts = make_hosts(1, own_name=own_name)

    assert hosts.run(0, python(LOOK_UP)).stdout.strip() == found


def test_a_cut_link_heals(make_hosts: MakeHosts) -> None:
    """Data sent during the cut arrives afterwards; a new connection fails during it."""
    hosts = make_hosts(2)
    serve(hosts, 0, hosts.addresses[0])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with hosts.popen(1, python(TALK, hosts.addresses[0]), **pipes) as talk:
        assert talk.stdin is not None
        assert talk.stdout is not None
        talk.stdin.write("before\n")
        before = talk.stdout.readline()
        hosts.cut(1)
        talk.stdin.write("while\n")
        refused = hosts.run(1, python(ASK, hosts.addresses[0], "0.5"))
        hosts.heal(1)
        after = talk.stdout.readline()
        talk.stdin.close()

    assert (before, after) == ("before\n", "while\n")
    assert refused.returncode == 1
    assert "timed out" in refused.stderr or "No route" in refused.stderr, refused.stderr


def test_a_command_finds_its_folder_and_environment(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """As it would outside the host."""
    hosts = make_hosts(1)
    found = hosts.run(0, ["sh", "-c", 'pwd; echo "$MINE"; exit 7'], cwd=tmp_path, env={"MINE": "1"})

    assert (found.stdout, found.returncode) == (f"{tmp_path}\n1\n", 7)


def test_nothing_is_left_of_a_killed_run(make_hosts: MakeHosts) -> None:
    """The hosts notice and kill all of their processes."""
    program = (
        "import sys, time\nfrom tests.engines.hosts import Hosts\n"
        "hosts = Hosts(1).__enter__()\n"
        "sleeper = hosts.popen(0, ['sleep', '1000'], start_new_session=True)\n"
        "while sleeper.pid not in hosts.processes(0): time.sleep(0.01)\n"
        "print(sleeper.pid, flush=True); time.sleep(1000)"
    )
    command = python(program)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        network = network_of(pid)
        assert network not in (None, network_of(os.getpid()))
        run.kill()
    wait_until(lambda: processes_in(network) == [], lambda: f"left: {processes_in(network)}")
