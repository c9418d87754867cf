"""Hosts that each run a real sshd, and an ssh configuration for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.kit import wait_until

_PORT = 2222
_SSHD = """
Port {port}
ListenAddress {address}
HostKey {folder}/key_of_{name}
AuthorizedKeysFile {folder}/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
LogLevel ERROR
SetEnv TMPDIR={tmp}
MaxStartups {startups}
"""
_SSH = """
Host {names}
  Port {port}
  User {user}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking {strict}
"""


class Sshd:
    """Hosts reachable by ssh.

    Args:
        hosts: The hosts; the servers end with them.
        folder: Where keys and configuration files go.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        os.makedirs("/run/sshd", exist_ok=True)  # sshd's privilege separation directory
        for name in ("id", *(f"key_of_{name}" for name in hosts.names)):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
            )
        known = []
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            key = " ".join((folder / f"key_of_{name}.pub").read_text().split()[:2])
            known.append(f"[{name}]:{_PORT},[{address}]:{_PORT} {key}\n")
        (folder / "known").write_text("".join(known))
        self.write_config()
        self.servers = [self.serve(host) for host in range(len(hosts.names))]

    @property
    def ssh(self) -> str:
        """The ssh command that reaches the hosts."""
        return f"ssh -F {self.folder / 'config'}"

    @property
    def all(self) -> str:
        """The value of --hosts that names every host."""
        return ",".join(self.hosts.names)

    def write_config(self, more: str = "") -> None:
        """Write the client's configuration, with ``more`` lines for every host."""
        text = _SSH.format(
            names=" ".join([*self.hosts.names, "10.77.0.*"]), port=_PORT, folder=self.folder,
            user=os.environ.get("USER") or "root", strict="yes",
        )  # fmt: skip
        (self.folder / "config").write_text(f"{text}{more}\n")

    def processes(self, host: int) -> list[int]:
        """Return the processes on a host, apart from its server."""
        return [pid for pid in self.hosts.processes(host) if pid != self.servers[host].pid]

    def serve(self, host: int, *, startups: int = 100) -> subprocess.Popen[Any]:
        """Start a server on a host and wait until it listens.

        ``startups`` limits the unauthenticated connections at one time.
        """
        name = self.hosts.names[host]
        config = self.folder / f"sshd_{name}"
        config.write_text(
            _SSHD.format(
                port=_PORT,
                address=self.hosts.addresses[host],
                folder=self.folder,
                name=name,
                tmp=tempfile.gettempdir(),
                startups=startups,
            )
        )
        log = open(self.folder / f"log_of_{name}", "w")  # noqa: SIM115 - the server inherits it
        server = self.hosts.popen(
            host, [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", config], stderr=log
        )
        log.close()
        wait_until(lambda: self._answers(host), (self.folder / f"log_of_{name}").read_text)
        return server

    def _answers(self, host: int) -> bool:
        found = self.hosts.run(host, ["ss", "-Hltn", f"sport = {_PORT}"])
        return str(_PORT) in found.stdout


MakeSshd = Callable[..., Sshd]


def why_no_sshd() -> str | None:
    """Return why this machine cannot run sshd, or ``None`` if it can."""
    if os.geteuid() != 0:
        return "sshd needs root"
    there = shutil.which("sshd") or os.path.exists("/usr/sbin/sshd")
    return None if there and shutil.which("ssh") else "sshd and ssh are needed"


@pytest.fixture
def make_sshd(make_hosts: MakeHosts, tmp_path: Path) -> MakeSshd:
    """A function that takes the arguments of ``Hosts`` and runs sshd on each host."""
    reason = why_no_sshd()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    return lambda count, **options: Sshd(make_hosts(count, **options), folder)
