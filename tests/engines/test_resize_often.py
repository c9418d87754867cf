"""Nodes come and go many times, in a seeded order: never a hang, an orphan or a wrong world size.

``MESHRUN_RESIZES`` is how many changes there are, ``MESHRUN_RESIZE_SEED`` the seed.
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
"""How often a second change comes before the first is through."""
RESTARTS = ("--max-restarts", "1000")
_SAYS = re.compile(r"rank (\d+) of (\d+) in (\d+) on node(\d) node (\d)")


class Cluster:
    """Hosts, the launchers that are alive on them, and what is to be seen of their ranks."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.launches = {
            host: start(hosts, host, folder, *RESTARTS, mesh="dp=1:8,tp=1") for host in range(2)
        }
        self.ended: list[Launch] = []
        self.cut: int | None = None
        self.raised = 0

    def choices(self) -> list[str]:
        """Return what may happen now."""
        others = len(self.launches) - 1
        if self.cut is not None:
            return ["heal"]
        return [
            *(["join", "join"] if others < NODES - 1 else []),
            *(["kill", "host", "cut"] if others else []),
            "raise",
        ]

    def sudden(self) -> list[str]:
        """Return what may happen while nodes come or go already."""
        others = len(self.launches) - 1
        return [*(["kill", "host"] if others else []), *(["join"] if others < NODES - 1 else [])]

    def happen(self, what: str, chance: random.Random) -> str:
        """Have something happen; return what it was."""
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
        """Return the hosts that are to have ranks."""
        return {host for host in self.launches if host != self.cut}

    def generation(self) -> int:
        """Return the last generation that was seen."""
        seen = [int(said[3]) for said in self._said()]
        return max(seen, default=-1)

    def is_settled(self, after: int) -> bool:
        """Whether a generation after one has a rank on every host that is to have one."""
        now = self.generation()
        said = [each for each in self._said() if int(each[3]) == now]
        return now > after and {int(each[4]) for each in said} == self.expected()

    def check(self) -> None:
        """Check that the ranks of each generation agree on their number, and are all different."""
        by_generation: dict[str, list[re.Match[str]]] = {}
        for said in self._said():
            by_generation.setdefault(said[3], []).append(said)
        for said in by_generation.values():
            assert len({each[2] for each in said}) == 1, [each[0] for each in said]
            assert len({each[1] for each in said}) == len(said), [each[0] for each in said]
            assert len(said) <= int(said[0][2])

    def text(self) -> str:
        """Return what every launcher has printed."""
        all_of_them = [*self.ended, *self.launches.values()]
        return "\n".join(f"--- node {each.host}:\n{each.text}" for each in all_of_them)

    def _said(self) -> list[re.Match[str]]:
        return list(_SAYS.finditer(self.text()))


@pytest.mark.timeout(60 + 30 * COUNT)
def test_nodes_come_and_go(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Launchers and hosts are killed, links cut and healed, ranks fail; nodes join."""
    chance = random.Random(SEED)
    hosts = make_hosts(NODES)
    more = Cluster(hosts, tmp_path)
    wait_until(lambda: more.is_settled(-1), more.text)
    for number in range(COUNT):
        before, began = more.generation(), time.monotonic()
        what = more.happen(chance.choice(more.choices()), chance)
        if what.startswith(("join", "kill", "host")) and chance.random() < _AT_ONCE:
            what += " and " + more.happen(chance.choice(more.sudden()), chance)
        after = before - (re.search(r"join (\d) and (kill|host) \1", what) is not None)
        wait_until(lambda after=after: more.is_settled(after), more.text)  # type: ignore[misc]
        print(f"{number}: {what}: {more.generation()} after {time.monotonic() - began:.1f} s")
        more.check()
    if more.cut is not None:
        before = more.generation()
        more.happen("heal", chance)
        wait_until(lambda: more.is_settled(before), more.text)
    (tmp_path / "go").touch()

    assert end_all([*more.launches.values()]) == [0] * len(more.launches), more.text()
    took = re.findall(r"it took ([\d.]+) s", more.launches[0].text)
    print(f"{len(took)} changes, the slowest took {max(map(float, took))} s")
    all_gone(hosts)
    for left in Path(tempfile.gettempdir()).glob("meshrun*"):  # of hosts that were killed whole
        shutil.rmtree(left)
