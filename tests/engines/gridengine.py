"""Grid Engine on several hosts: a qmaster on the first, an execd on each, all in one folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.kit import wait_until

_ROOT = Path("/var/lib/gridengine")
_SHARE = Path("/usr/share/gridengine")
_TOOLS = Path("/usr/lib/gridengine")
_BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn false
spooling_method berkeleydb
spooling_lib libspoolb
spooling_params {folder}/spooldb
binary_path /usr/sbin
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_PE = {
    "pe_name": "mp", "slots": "99", "user_lists": "NONE", "xuser_lists": "NONE",
    "start_proc_args": "NONE", "stop_proc_args": "NONE", "allocation_rule": "2",
    "control_slaves": "TRUE", "job_is_first_task": "FALSE", "urgency_slots": "min",
    "accounting_summary": "FALSE", "qsort_args": "NONE",
}  # fmt: skip


class GridEngine:
    """A cluster with two slots on each host and one parallel environment."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.output = folder / "job.out"
        self._root = folder / "root"
        self.env = {"SGE_ROOT": str(self._root), "SGE_CELL": "default", "SGE_ND": "1",
                    "SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}  # fmt: skip

    def start(self) -> None:
        """Create the cluster and wait until it accepts jobs."""
        common = self._root / "default" / "common"
        for each in (common, self._folder / "qmaster", self._folder / "spooldb"):
            each.mkdir(parents=True)
        for name in ("bin", "lib", "util", "utilbin"):
            (self._root / name).symlink_to(_ROOT / name)
        (common / "bootstrap").write_text(_BOOTSTRAP.format(folder=self._folder))
        (common / "act_qmaster").write_text(f"{self.hosts.names[0]}\n")
        text = (_SHARE / "default-configuration").read_text()
        text = re.sub(r"(?m)^min_(uid|gid)\s.*", r"min_\1 0", text)
        text = re.sub(r"(?m)^execd_spool_dir\s.*", f"execd_spool_dir {self._folder}/execd", text)
        (self._folder / "configuration").write_text(text)
        self._tool("spoolinit", "berkeleydb", "libspoolb", f"{self._folder}/spooldb", "init")
        self._tool("spooldefaults", "configuration", f"{self._folder}/configuration")
        self._tool("spooldefaults", "complexes", str(_SHARE / "util/resources/centry"))
        self._tool("spooldefaults", "usersets", str(_SHARE / "util/resources/usersets"))
        self._tool("spooldefaults", "managers", "root")
        self._daemon(0, "sge_qmaster")
        wait_until(lambda: self._ask("qconf", "-sh").returncode == 0, self._messages)
        self._ask("qconf", "-ah", ",".join(self.hosts.names))
        self._ask("qconf", "-as", ",".join(self.hosts.names))
        for host in range(len(self.hosts.names)):
            self._daemon(host, "sge_execd")
        wait_until(lambda: all(name in self._ask("qhost").stdout for name in self.hosts.names),
                   self._messages)  # fmt: skip
        self._change("-Ap", _PE)
        self._change("-Msconf", {"schedule_interval": "0:0:1", "flush_submit_sec": "1"}, "-ssconf")
        queue = {"qname": "all.q", "hostlist": " ".join(self.hosts.names), "pe_list": "mp",
                 "slots": "2", "load_thresholds": "NONE", "shell_start_mode": "unix_behavior",
                 "shell": "/bin/sh"}  # fmt: skip
        self._change("-Aq", queue, "-sq")

    def run_job(self, script: str, *, nodes: int) -> str:
        """Run a script as a job on ``nodes`` hosts and return its output."""
        done = self.hosts.run(0, self._qsub(script, nodes, "-sync", "y"), env=self.env, timeout=110)
        assert self.output.exists(), done.stdout + done.stderr
        return self.output.read_text()

    def start_job(self, script: str, *options: str, nodes: int) -> None:
        """Submit a script as a job on ``nodes`` hosts; its output goes to :attr:`output`."""
        done = self.hosts.run(0, self._qsub(script, nodes, "-N", "mine", *options), env=self.env)
        assert done.returncode == 0, done.stdout + done.stderr

    def qdel(self) -> None:
        """Cancel the job from :meth:`start_job`."""
        self._ask("qdel", "mine")
        wait_until(lambda: self._ask("qstat").stdout == "", lambda: self._ask("qstat").stdout)

    def _qsub(self, script: str, nodes: int, *options: str) -> list[str]:
        path = self._folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return ["qsub", *options, "-V", "-cwd", "-j", "y", "-o", str(self.output), "-pe", "mp",
                str(2 * nodes), "-b", "y", str(path)]  # fmt: skip

    def _tool(self, *words: str) -> None:
        env = {**os.environ, **self.env}
        subprocess.run([_TOOLS / words[0], *words[1:]], env=env, check=True, capture_output=True)

    def _daemon(self, host: int, name: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.hosts.popen(host, [name], env=self.env, cwd="/", **quiet)

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.run(0, words, env=self.env)

    def _change(self, option: str, values: dict[str, str], show: str | None = None) -> None:
        """Add or change an object, whose attributes ``qconf`` reads from a file."""
        found = self._ask("qconf", show).stdout.replace("\\\n", " ") if show else ""
        rows = dict(line.split(None, 1) for line in found.splitlines() if " " in line)
        path = self._folder / "object"
        path.write_text("".join(f"{k} {v}\n" for k, v in {**rows, **values}.items()))
        done = self._ask("qconf", option, str(path))
        assert done.returncode == 0, done.stdout + done.stderr

    def _messages(self) -> str:
        logs = self._folder.glob("*/messages")
        return "\n".join(log.read_text() for log in logs)


@pytest.fixture
def gridengine(make_hosts: MakeHosts, tmp_path: Path) -> GridEngine:
    """A Grid Engine cluster of two hosts."""
    missing = [name for name in ("sge_qmaster", "sge_execd", "qsub") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"Grid Engine needs {', '.join(missing) or 'root'}")
    cluster = GridEngine(make_hosts(2), tmp_path)
    cluster.start()
    return cluster
