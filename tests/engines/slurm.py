"""A real Slurm cluster on its own hosts: one slurmctld, a slurmd per host, one shared munged.

Each host claims four CPUs and two GPUs, whose device files are copies of /dev/null. A requeued job
waits ``cred_expire`` seconds, 120 by default, before it starts again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.accounting import CONF, start_accounting
from tests.engines.hosts import Hosts, why_no_hosts
from tests.kit import wait_until

_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "sinfo")
_NODES = 3
FIRST_TWO = "--nodelist=sl[0-1]"  # else Slurm picks others while it cleans up after a job
_QUEUED_S = 30  # how long a command waits for its nodes before it gives up
_CONF = """\
ClusterName=tests
SlurmctldHost={first}({address})
NodeName={nodes} NodeAddr={addresses} CPUs=4 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting}
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=20
KillWait=30
"""
_NO_RECORDS = "AccountingStorageType=accounting_storage/none"
_TOPOLOGY = """\
SwitchName=leaf0 Nodes=sl[0-1]
SwitchName=leaf1 Nodes=sl2
SwitchName=top Switches=leaf[0-1]
"""


class Slurm:
    """The cluster and its commands, each of which has a time limit."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self._folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def srun(self, *args: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run ``srun`` on the first host."""
        return self.run(["srun", f"--immediate={_QUEUED_S}", *args], **kwargs)

    def salloc(self, *args: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run ``salloc`` with a command on the first host."""
        return self.run(["salloc", f"--immediate={_QUEUED_S}", *args], **kwargs)

    def sbatch(self, script: str, *args: str, **kwargs: Any) -> str:
        """Submit a batch script, wait for its job, and return the job's output."""
        path = self._folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        output = self._folder / "job.out"
        sent = self.run(["sbatch", "--parsable", f"--output={output}", *args, path], **kwargs)
        job = sent.stdout.strip()
        self.wait_gone(job)
        return output.read_text(errors="replace")

    def wait_gone(self, job: str) -> None:
        """Wait until a job has left the queue."""
        listed = ["squeue", "--noheader", f"--jobs={job}"]
        wait_until(lambda: not self.run(listed).stdout, lambda: f"job {job}\n{self.log()}")

    def scancel(self, *args: str) -> None:
        """Cancel jobs, for example ``"--name=mine"``."""
        self.run(["scancel", *args])

    def popen(self, *args: str | Path, **kwargs: Any) -> subprocess.Popen[Any]:
        """Start a Slurm command on the first host: ``srun``, ``sbatch``, ..."""
        env = {**self.env, **kwargs.pop("env", {})}
        return self.hosts.popen(0, list(args), env=env, **kwargs)

    def run(self, argv: Sequence[str | Path], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command on the first host."""
        env = {**self.env, **kwargs.pop("env", {})}
        return self.hosts.run(0, argv, env=env, **kwargs)

    def wait_idle(self) -> None:
        """Wait until every node can take a job."""
        states = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        wait_until(
            lambda: self.run(states).stdout.strip() == str(len(self.hosts.names)),
            lambda: f"{len(self.hosts.names)} idle nodes:\n{self.run(['sinfo', '-lN']).stdout}",
        )

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """Suspend daemons on all hosts: ``slurmctld``, ``slurmd`` or ``slurmstepd``."""
        found = [each for host in range(_NODES) for each in self.daemons(host, *names)]
        for daemon in found:
            daemon.suspend()
        try:
            yield
        finally:
            for daemon in found:
                daemon.resume()

    def daemons(self, host: int, *names: str) -> list[psutil.Process]:
        """Return the daemons on a host with one of these names."""
        found = map(psutil.Process, self.hosts.processes(host))
        return [each for each in found if each.name() in names]

    @contextmanager
    def plug_in(self, library: Path, argument: str | Path) -> Iterator[None]:
        """Make srun and its steps load a SPANK plug-in, which adds options."""
        stack = self._folder / "plugstack.conf"
        stack.write_text(f"required {library} {argument}\n")
        try:
            yield
        finally:
            stack.unlink()

    def log(self) -> str:
        """Return the ends of the daemons' logs."""
        logs = sorted([*self._folder.glob("*.log"), *self._folder.glob("munge/log")])
        return "\n".join(f"{log.name}: {log.read_text()[-600:]}" for log in logs)


@contextmanager
def start_slurm(*, records: bool = False, **host_options: Any) -> Iterator[Slurm]:
    """Start a cluster of three nodes that ends with the block; ``records`` enables accounting."""
    # The path is short because it holds a socket, and no test's own as the cluster may outlive one.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with Hosts(_NODES, name="sl", **host_options) as hosts:
            _configure(hosts, folder, accounting=CONF if records else _NO_RECORDS)
            slurm = Slurm(hosts, folder)
            _start_munge(slurm, folder / "munge")
            if records:
                start_accounting(hosts, folder)
            _start(slurm)
            yield slurm
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(hosts: Hosts, folder: Path, *, accounting: str) -> None:
    last = len(hosts.names) - 1
    text = _CONF.format(
        first=hosts.names[0],
        address=hosts.addresses[0],
        nodes=f"sl[0-{last}]",
        addresses=f"10.77.0.[1-{last + 1}]",
        user=subprocess.check_output(["id", "-un"], text=True).strip(),
        folder=folder,
        accounting=accounting.format(first=hosts.names[0], folder=folder),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "topology.conf").write_text(_TOPOLOGY)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    gpus = []
    for name in hosts.names:
        gpus.append(f"NodeName={name} Name=gpu File={folder}/{name}.gpu[0-1]\n")
        for index in range(2):
            device = folder / f"{name}.gpu{index}"
            subprocess.run(["mknod", device, "c", "1", "3"], check=True)
    (folder / "gres.conf").write_text("".join(gpus))


def _start_munge(slurm: Slurm, munge: Path) -> None:
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o600)
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    options = {"key": "key-file", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    words = [f"--{options.get(each, each)}={munge / name}" for each, name in files.items()]
    _run_daemon(slurm, 0, ["munged", "--force", *words])


def _start(slurm: Slurm) -> None:
    _run_daemon(slurm, 0, ["slurmctld", "-i"])
    for host, name in enumerate(slurm.hosts.names):
        _run_daemon(slurm, host, ["slurmd", "-N", name])
    slurm.wait_idle()


def _run_daemon(slurm: Slurm, host: int, words: Sequence[str]) -> None:
    started = slurm.hosts.run(host, words, env=slurm.env)
    if started.returncode:
        raise OSError(f"{words[0]}: {started.stderr.strip()}\n{slurm.log()}")


def why_no_slurm() -> str | None:
    """Return why this machine cannot run a Slurm cluster, or ``None`` if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"Slurm needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return why_no_hosts()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """The cluster of this test run; each host's own name resolves to loopback, as on Debian."""
    reason = why_no_slurm()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(start_slurm(own_name="loopback"))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield cluster
