"""Nodes join and leave many times, in a seeded order: no hang, orphan or wrong world size.

``MESHRUN_RESIZES`` is the number of changes, ``MESHRUN_RESIZE_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.test_resize import start
from tests.engines.together import Launch, all_gone, end_all
from tests.kit import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.nightly]
COUNT = int(os.environ.get("MESHRUN_RESIZES", "100"))
SEED = int(os.environ.get("MESHRUN_RESIZE_SEED", "1"))
NODES = 4
_AT_ONCE = 0.4
"""Probability that a second change comes before the first is complete."""
RESTARTS = ("--max-restarts", "1000")
_SAYS = re.compile(r"rank (\d+) of (\d+) in (\d+) on node(\d) node (\d)")


class Cluster:
    """Hosts, the launchers running on them, and what their ranks printed."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.launches = {
            host: start(hosts, host, folder, *RESTARTS, mesh="dp=1:8,tp=1") for host in range(2)
        }
        self.ended: list[Launch] = []
        self.cut: int | None = None
        self.raised = 0

    def choices(self) -> list[str]:
        """Return the changes possible now."""
        others = len(self.launches) - 1
        if self.cut is not None:
            return ["heal"]
        return [
            *(["join", "join"] if others < NODES - 1 else []),
            *(["kill", "host", "cut"] if others else []),
            "raise",
        ]

    def sudden(self) -> list[str]:
        """Return the changes possible while another one is in progress."""
        others = len(self.launches) - 1
        return [*(["kill", "host"] if others else []), *(["join"] if others < NODES - 1 else [])]

    def happen(self, what: str, chance: random.Random) -> str:
        """Carry out a change and return its description."""
        free = [host for host in range(1, NODES) if host not in self.launches]
        host = chance.choice(free if what == "join" else [*self.launches][1:] or [0])
        match what:
            case "join":
                self.launches[host] = start(
                    self.hosts, host, self.folder, *RESTARTS, mesh="dp=1:8,tp=1"
                )
            case "kill":
                self.ended.append(self.launches.pop(host))
                os.kill(self.ended[-1].process.pid, signal.SIGKILL)
            case "host":
                self.ended.append(self.launches.pop(host))
                self.hosts.kill_all(host)
            case "cut":
                self.cut = host
                self.hosts.cut(host)
            case "heal":
                host, self.cut = self.cut or 0, None
                self.hosts.heal(host)
            case "raise":
                self.raised += 1
                (self.folder / "raise").touch()
        return f"{what} {host}"

    def expected(self) -> set[int]:
        """Return the hosts that should have ranks."""
        return {host for host in self.launches if host != self.cut}

    def generation(self) -> int:
        """Return the latest generation seen, -1 if none."""
        seen = [int(line[3]) for line in self._lines()]
        return max(seen, default=-1)

    def is_settled(self, after: int) -> bool:
        """Whether a generation later than ``after`` has a rank on every expected host."""
        now = self.generation()
        lines = [line for line in self._lines() if int(line[3]) == now]
        return now > after and {int(line[4]) for line in lines} == self.expected()

    def check(self) -> None:
        """Check that the ranks of each generation are distinct and agree on the world size."""
        by_generation: dict[str, list[re.Match[str]]] = {}
        for line in self._lines():
            by_generation.setdefault(line[3], []).append(line)
        for lines in by_generation.values():
            assert len({line[2] for line in lines}) == 1, [line[0] for line in lines]
            assert len({line[1] for line in lines}) == len(lines), [line[0] for line in lines]
            assert len(lines) <= int(lines[0][2])

    def text(self) -> str:
        """Return the output of every launcher."""
        all_of_them = [*self.ended, *self.launches.values()]
        return "\n".join(f"--- node {each.host}:\n{each.text}" for each in all_of_them)

    def _lines(self) -> list[re.Match[str]]:
        return list(_SAYS.finditer(self.text()))


@pytest.mark.timeout(60 + 30 * COUNT)
def test_nodes_come_and_go(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Launchers and hosts are killed, links are cut and healed, ranks fail, nodes join."""
    chance = random.Random(SEED)
    hosts = make_hosts(NODES)
    cluster = Cluster(hosts, tmp_path)
    wait_until(lambda: cluster.is_settled(-1), cluster.text)
    for number in range(COUNT):
        before, began = cluster.generation(), time.monotonic()
        what = cluster.happen(chance.choice(cluster.choices()), chance)
        if what.startswith(("join", "kill", "host")) and chance.random() < _AT_ONCE:
            what += " and " + cluster.happen(chance.choice(cluster.sudden()), chance)
        after = before - (re.search(r"join (\d) and (kill|host) \1", what) is not None)
        wait_until(lambda after=after: cluster.is_settled(after), cluster.text)  # type: ignore[misc]
        print(f"{number}: {what}: {cluster.generation()} after {time.monotonic() - began:.1f} s")
        cluster.check()
    if cluster.cut is not None:
        before = cluster.generation()
        cluster.happen("heal", chance)
        wait_until(lambda: cluster.is_settled(before), cluster.text)
    (tmp_path / "go").touch()

    assert end_all([*cluster.launches.values()]) == [0] * len(cluster.launches), cluster.text()
    took = re.findall(r"it took ([\d.]+) s", cluster.launches[0].text)
    print(f"{len(took)} changes, the slowest took {max(map(float, took))} s")
    all_gone(hosts)
    for left in Path(tempfile.gettempdir()).glob("meshrun*"):  # by killed hosts
        shutil.rmtree(left)
