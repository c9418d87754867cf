"""Job accounting for sacct: slurmdbd and MariaDB on the first host of a Slurm cluster."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.engines.hosts import Hosts
from tests.kit import wait_until

CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={first}
AccountingStoragePass={folder}/munge/socket
"""
_TOOLS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db", "mariadb")
_DBD_CONF = """\
DbdHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
PidFile={folder}/dbd.pid
LogFile={folder}/dbd.log
"""
_GRANT = "create user slurm@'%' identified by 'slurm'; grant all on slurm.* to slurm@'%'"


def why_no_accounting() -> str | None:
    """Return why this machine cannot record jobs, or ``None`` if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"accounting needs {', '.join(missing)}" if missing else None


def start_accounting(hosts: Hosts, folder: Path) -> None:
    """Start the database and the daemon; munged must be running. Both end with the host."""
    data = folder / "database"
    data.mkdir()
    place = ["--no-defaults", f"--datadir={data}", "--user=root"]
    made = hosts.run(0, ["mariadb-install-db", *place, "--skip-test-db"])
    assert made.returncode == 0, made.stderr
    socket = f"--socket={data}/socket"
    hosts.popen(
        0, ["mariadbd", *place, socket, "--bind-address=127.0.0.1", f"--log-error={data}/log"]
    )
    client = ["mariadb", "--no-defaults", "--user=root", socket, "--execute", _GRANT]
    wait_until(lambda: hosts.run(0, client).returncode == 0, (data / "log").read_text)
    conf = folder / "slurmdbd.conf"
    with open(os.open(conf, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(_DBD_CONF.format(first=hosts.names[0], folder=folder))
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    assert hosts.run(0, ["slurmdbd"], env=env).returncode == 0
    add = ["sacctmgr", "--immediate", "add", "cluster", "tests"]
    wait_until(
        lambda: hosts.run(0, add, env=env).returncode == 0,
        (folder / "dbd.log").read_text,
    )
