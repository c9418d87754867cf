"""Hosts made of namespaces: each has its own network, host name and hosts file.

Files, process ids and the clock are the machine's. The hosts share a switch of their own, so every
test can use the same addresses without a conflict.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.engines.holder import kill_all_in, network_of, processes_in

OwnName = Literal["address", "loopback", "nothing"]
"""What a host's own name resolves to: its address, 127.0.1.1 as on Debian, or nothing."""
_HOLDER = Path(__file__).with_name("holder.py")
_LIMIT_S = 60.0
_IS_ROOT = os.geteuid() == 0
# Turns namespaces into a host: set its name, mount its files over the machine's, run the holder.
_BECOME = (
    'set -e; hostname "$0"; for file in hosts nsswitch.conf; do'
    ' if [ -e /etc/$file ]; then mount --bind "$1/$file" /etc/$file; fi; done; shift; exec "$@"'
)


class Hosts:
    """Hosts on one switch, which end with the ``with`` block.

    Args:
        count: The number of hosts.
        name: Prefix of the host names; the host's number follows.
        own_name: What each host's own name resolves to; with ``nothing``, the hosts file has no
            other host's name either.
        ipv6: Whether hosts also have an IPv6 address that their names resolve to.
    """

    def __init__(
        self, count: int, *, name: str = "node", own_name: OwnName = "address", ipv6: bool = False
    ) -> None:
        self.names = [f"{name}{index}" for index in range(count)]
        self.addresses = [f"10.77.0.{index + 1}" for index in range(count)]
        self.addresses_v6 = [f"fd77::{index + 1}" for index in range(count)] if ipv6 else []
        self._own_name = own_name
        self._holders: list[subprocess.Popen[str]] = []  # the switch, then the hosts
        self._started: dict[int, list[subprocess.Popen[Any]]] = defaultdict(list)
        """The processes started on each host, by its number."""

    def __enter__(self) -> Hosts:
        try:
            self._hold("switch", _new_namespaces(user=not _IS_ROOT))
            self._ip_switch("link add br0 type bridge\nlink set br0 up")
            for index in range(len(self.names)):
                self._add(index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes on the hosts, which ends the hosts."""
        for holder in reversed(self._holders):
            holder.communicate()  # closes its stdin, which it waits for
        for process in chain(*self._started.values()):
            process.wait()
        self._holders.clear()

    def popen(
        self, host: int, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None, **kwargs: Any,
    ) -> subprocess.Popen[Any]:  # fmt: skip
        """Start a command on a host; the returned process is the command itself.

        ``env`` is added to this process's environment.
        """
        where = os.path.abspath(cwd or ".")  # entering another mount namespace leads to /
        change = ["sh", "-c", 'cd "$0" && exec "$@"', where]
        command = [*self.enter(host), *change, *map(str, argv)]
        process = subprocess.Popen(command, env={**os.environ, **(env or {})}, **kwargs)
        self._started[host].append(process)
        return process

    def run(
        self, host: int, argv: Sequence[str | Path], *, timeout: float = _LIMIT_S, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; return its output and exit code."""
        kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
        with self.popen(host, argv, **kwargs) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as late:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{argv} took {timeout} s:\n{out}\n---\n{err}") from late
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def cut(self, host: int) -> None:
        """Take a host's link down: packets are lost silently."""
        self._ip_switch(f"link set port{host} down")

    def heal(self, host: int) -> None:
        """Bring a host's link back up."""
        self._ip_switch(f"link set port{host} up")

    def lose_towards(self, host: int, other: int) -> None:
        """Drop only the packets that one host sends to another."""
        self._ip(self._holder(host), f"route add blackhole {self.addresses[other]}/32")

    def deliver_towards(self, host: int, other: int) -> None:
        """Undo ``lose_towards``."""
        self._ip(self._holder(host), f"route del blackhole {self.addresses[other]}/32")

    def drop(self, host: int, which: str) -> None:
        """Drop the incoming packets of a host that match an nftables rule.

        The machine's own rules are unaffected: each host has its own network namespace.
        """
        chain = "add chain inet lost in { type filter hook input priority 0; }"
        rule = f"add rule inet lost in iifname eth0 {which} drop"
        self._change_network(host, "nft", "add table inet lost", chain, rule)

    def reset(self, host: int, port: int) -> None:
        """Reset the connections of a host to a port, as a firewall may; both ends get an error."""
        self._change_network(host, "ss", f"-K dport = {port}")

    def slow(self, host: int, *, towards: int | None = None) -> None:
        """Limit what one host sends, to all others or to one, to 64 megabits a second.

        nftables cannot do this: its limit lets a whole second's worth pass in one burst.
        """
        there = f"{self.addresses[towards]}/32" if towards is not None else "0.0.0.0/0"
        self._change_network(
            host,
            "tc",
            "qdisc add dev eth0 root handle 1: htb default 1",
            "class add dev eth0 parent 1: classid 1:1 htb quantum 60000 rate 100gbit",
            "class add dev eth0 parent 1: classid 1:2 htb quantum 60000 rate 64mbit burst 64k",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {there} flowid 1:2",
        )

    def _change_network(self, host: int, tool: str, *changes: str) -> None:
        if shutil.which(tool) is None:
            pytest.skip(f"this change of a network needs {tool}")
        for words in changes:
            done = self.run(host, [tool, *words.split()])
            if done.returncode:
                pytest.skip(f"{tool} {words}: {done.stderr.strip()}")

    def add_name(self, host: int, name: str, address: str) -> None:
        """Make a name resolve to an address on one host from now on."""
        self.run(host, ["sh", "-c", 'echo "$0 $1" >> /etc/hosts', address, name])

    def processes(self, host: int) -> list[int]:
        """Return all processes on a host, oldest first, whoever started them."""
        holder = self._holder(host)
        return [pid for pid in processes_in(network_of(holder)) if pid != holder]

    def launches(self) -> list[str]:
        """Return a line for each process of a launch on any host, without a cluster's daemons."""
        found = []
        for host in range(len(self.names)):
            for pid in self.processes(host):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                except OSError:  # the process has ended
                    continue
                if b"meshrun" in words:
                    found.append(f"{self.names[host]}: {pid} {words.decode(errors='replace')}")
        return found

    def kill_all(self, host: int) -> None:
        """Kill all processes on a host at once; the host itself stays usable.

        The kernel still closes their connections. To simulate a power loss, cut the link first.
        """
        holder = self._holder(host)
        for process in self._started[host]:  # one just started may not have entered the host yet
            process.kill()
        kill_all_in(network_of(holder), but=holder)

    def enter(self, host: int, *, from_a_host: bool = False) -> list[str]:
        """Return the prefix that makes a command run on a host."""
        user = [] if _IS_ROOT or from_a_host else ["--user", "--preserve-credentials"]
        holder = str(self._holder(host))
        return ["nsenter", "--target", holder, *user, "--net", "--uts", "--mount", "--"]

    def _holder(self, host: int) -> int:
        return self._holders[1 + host].pid

    def _hold(self, name: str, into_namespaces: Sequence[str]) -> None:
        # The bind mounts keep the files alive, so their folder can be removed.
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            Path(folder, "hosts").write_text(self._hosts_file(name))
            Path(folder, "nsswitch.conf").write_text("hosts: files\n")
            holder = subprocess.Popen(
                [*into_namespaces, "sh", "-c", _BECOME, name, folder,
                 sys.executable, "-ISs", str(_HOLDER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True, env={"PATH": os.environ["PATH"]}, cwd="/",
            )  # fmt: skip
            self._holders.append(holder)
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                raise OSError(f"no namespaces for {name}: {holder.communicate()[1].strip()}")

    def _add(self, index: int) -> None:
        switch = self._holders[0].pid
        into = [] if _IS_ROOT else _enter_namespaces(switch, "--user", "--preserve-credentials")
        self._hold(self.names[index], [*into, *_new_namespaces(user=False)])
        port = f"port{index}"
        self._ip_switch(
            f"link add {port} type veth peer name eth0 netns {self._holder(index)}\n"
            f"link set {port} master br0\nlink set {port} up"
        )
        lines = [f"addr add {self.addresses[index]}/24 dev eth0"]
        lines += [f"addr add {address}/64 dev eth0 nodad" for address in self._v6_of(index)]
        self._ip(self._holder(index), "\n".join([*lines, "link set lo up", "link set eth0 up"]))

    def _hosts_file(self, own: str) -> str:
        lines = ["127.0.0.1 localhost", *(["::1 localhost"] if self.addresses_v6 else [])]
        if self._own_name == "nothing":
            return "\n".join(lines) + "\n"
        for index, name in enumerate(self.names):
            if name == own and self._own_name == "loopback":
                lines.append(f"127.0.1.1 {name}")
            else:
                lines += [f"{each} {name}" for each in (self.addresses[index], *self._v6_of(index))]
        return "\n".join(lines) + "\n"

    def _v6_of(self, index: int) -> list[str]:
        return self.addresses_v6[index : index + 1]

    def _ip_switch(self, lines: str) -> None:
        self._ip(self._holders[0].pid, lines)

    def _ip(self, holder: int, lines: str) -> None:
        user = [] if _IS_ROOT else ["--user", "--preserve-credentials"]
        enter = _enter_namespaces(holder, *user, "--net")
        done = subprocess.run(
            [*enter, "ip", "-batch", "-"], input=lines + "\n", text=True, capture_output=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(f"ip: {done.stderr.strip()} of:\n{lines}")


def _new_namespaces(*, user: bool) -> list[str]:
    return ["unshare", *(["--user", "--map-root-user"] if user else []), "--net", "--uts",
            "--mount", "--"]  # fmt: skip


def _enter_namespaces(pid: int, *which: str) -> list[str]:
    return ["nsenter", "--target", str(pid), *which, "--"]


@cache
def why_no_hosts() -> str | None:
    """Return why hosts cannot be created on this machine, or ``None`` if they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    try:
        with Hosts(1):
            return None
    except OSError as error:
        return str(error)


MakeHosts = Callable[..., Hosts]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    """A function that takes the arguments of ``Hosts``; the hosts end with the test."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    made: list[Hosts] = []

    def make(count: int, **options: Any) -> Hosts:
        hosts = Hosts(count, **options)
        made.append(hosts.__enter__())
        return hosts

    try:
        yield make
    finally:
        for hosts in made:
            hosts.close()
