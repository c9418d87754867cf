"""A day of training on hosts that come and go: examples/resume.py in elastic launches.

``MESHRUN_DAY_EVENTS`` is the number of events in the nightly test, ``MESHRUN_DAY_SEED`` its seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.hosts import Hosts, MakeHosts
from tests.engines.together import Launch, all_gone, as_shell, end_all
from tests.kit import ROOT, wait_until
from tests.torch.test_resume import curve, finish, tolerance

pytestmark = [pytest.mark.torch, pytest.mark.slow]
EVENTS = int(os.environ.get("MESHRUN_DAY_EVENTS", "40"))
SEED = int(os.environ.get("MESHRUN_DAY_SEED", "1"))
RESUME = ROOT / "examples" / "resume.py"
FOR_EVER = 10**9
PREEMPTED = 75
_AT_ONCE = 0.3
"""Probability that a second event happens at the same moment."""
_STARTS = re.compile(r"from step (\d+) on, with \{'dp': (\d+)\}, generation (\d+)\n")
_RESTARTS = re.compile(r"restart (\d+) of \d+(?: in \d+ s)?, because (.*?)(?:; none of .*)?\n")


class Day:
    """Consecutive launches of one training, and the events that hit its nodes."""

    def __init__(self, hosts: Hosts, folder: Path, seed: int) -> None:
        self.hosts, self.folder = hosts, folder
        self.nodes, self.chance = len(hosts.names), random.Random(seed)
        self.launches: dict[int, Launch] = {}
        self.ended: list[Launch] = []
        self.cut: int | None = None
        self.printed = ""
        """By the first nodes of earlier launches."""
        self.done: Counter[str] = Counter()
        """The events of this launch."""
        self.lost: list[int] = []
        """The hosts lost in this launch, one entry for each loss."""
        self.took: dict[str, list[float]] = {}
        """Seconds from each event to the next training step, by kind of event."""

    # ---- a launch --------------------------------------------------------------------------

    def begin(self, count: int, last: int = FOR_EVER) -> None:
        """Launch on ``count`` hosts and wait until all of them train."""
        saved = curve(self.printed)[-1][0] if self.printed else 0
        self.launches, self.ended, self.lost = {}, [], []
        self.done.clear()
        for host in (0, *self.chance.sample(range(1, self.nodes), count - 1)):
            self._start(host, last)
        wait_until(lambda: self.is_training(0), self.text)
        assert self.starts()[0][0] == saved, self.text()

    def stop(self) -> None:
        """Preempt the launch, which saves its last step."""
        self.launches[0].send(signal.SIGTERM)
        self.close(PREEMPTED)

    def close(self, code: int) -> None:
        """Check how a launch ends and what its first node logged."""
        codes = [as_shell(each) for each in end_all([*self.launches.values()])]
        self.printed += self.launches[0].text
        assert codes == [code] * len(codes), self.text()
        all_gone(self.hosts)
        self.check_log()

    def _start(self, host: int, last: int) -> None:
        words = ["--nnodes", f"1:{self.nodes}", "--rdzv-backend", "c10d", "--rdzv-id", "day"]
        words += ["--rdzv-endpoint", "node0:29400", "--rdzv-conf", "last_call_timeout=2"]
        words += ["--mesh", f"dp=1:{self.nodes}", "--nproc-per-node", "1", "--device", "cpu"]
        words += ["--node-timeout", "3", "--shutdown-timeout", "5", "--max-restarts", "100"]
        words += ["--report", str(self.folder / "report.json")] if not host else []
        program = [str(RESUME), str(self.folder / "checkpoints"), str(last), "0.05"]
        self.launches[host] = Launch(self.hosts, host, [*words, *program])

    # ---- events ----------------------------------------------------------------------------

    def happen(self) -> None:
        """Cause one event, or two at once, and wait until training continues."""
        steps = self.furthest() + self.chance.randint(1, 15)
        wait_until(lambda: self.step() >= steps, self.text)
        before, spared = len(self.starts()), set[int]()
        began = time.monotonic()
        what = self._do(spared)
        if self.chance.random() < _AT_ONCE:
            what += " and " + self._do(spared)
        wait_until(lambda: self.is_training(before), self.text)
        took = time.monotonic() - began
        self.took.setdefault(re.sub(r" \d", "", what), []).append(took)
        if re.fullmatch(r"(join|heal) \d", what):
            self._check_no_step_is_lost()
        print(f"after step {steps}: {what}; {self.starts()[-1]} after {took:.2f} s", flush=True)

    def _check_no_step_is_lost(self) -> None:
        """When nodes only join, the step in progress is saved first."""
        *_, before, _ = self.launches[0].text.split("from step ")
        saved = curve(before)[-1][0] if curve(before) else int(before.split()[0])
        assert self.starts()[-1][0] == saved or " s are over" in before, self.text()

    def _do(self, spared: set[int]) -> str:
        there = [host for host in self.launches if host not in (self.cut, *spared)]
        others = [host for host in there if host]
        free = [
            host for host in range(self.nodes) if host not in self.launches and host not in spared
        ]
        what = self.chance.choice(
            [
                *(["join"] * 2 if free else []),
                *(["kill"] if others else []),
                *(["cut"] if others and self.cut is None else []),
                *(["heal"] * 2 if self.cut is not None and self.cut not in spared else []),
                "rank",
            ]
        )
        host = self.chance.choice({"join": free, "rank": there}.get(what, others) or [0])
        match what:
            case "join":
                self._start(host, FOR_EVER)
            case "kill":
                self.ended.append(self.launches.pop(host))
                self.lost.append(host)
                os.kill(self.ended[-1].process.pid, signal.SIGKILL)
            case "rank":
                os.kill(self._rank_on(host), signal.SIGKILL)
            case "cut":
                self.cut = host
                self.lost.append(host)
                self.hosts.cut(host)
            case "heal":
                host, self.cut = self.cut or 0, None
                self.hosts.heal(host)
        spared.add(host)
        self.done[what] += 1
        return f"{what} {host}"

    def heal(self) -> None:
        """Bring back the link that is cut, if one is."""
        if self.cut is not None:
            before, host, self.cut = len(self.starts()), self.cut, None
            self.hosts.heal(host)
            wait_until(lambda: self.is_training(before), self.text)

    def _rank_on(self, host: int) -> int:
        [zygote] = psutil.Process(self.launches[host].process.pid).children()
        return max(zygote.children(), key=lambda child: child.create_time()).pid

    # ---- observations ----------------------------------------------------------------------

    def starts(self) -> list[tuple[int, int, int]]:
        """Return the step, number of ranks and generation of each start in this launch."""
        found = _STARTS.findall(self.launches[0].text)
        return [(int(step), int(ranks), int(generation)) for step, ranks, generation in found]

    def furthest(self) -> int:
        """Return the furthest step ever taken."""
        return max((step for step, _ in curve(self.printed + self.launches[0].text)), default=0)

    def step(self) -> int:
        """Return the last step taken in this launch, or 0."""
        before = self.launches[0].text.rpartition(": loss ")[0]
        return int(before.rpartition("step ")[2] or 0)

    def is_training(self, after: int) -> bool:
        """Whether the ranks of all connected nodes have taken a step since a new start."""
        starts = self.starts()
        if len(starts) <= after or starts[-1][1] != len(self.launches) - (self.cut is not None):
            return False
        return ": loss " in self.launches[0].text.rpartition("from step ")[2]

    def text(self) -> str:
        """Return the output of every launcher."""
        each = [*self.ended, *self.launches.values()]
        return "\n".join(f"--- node {launch.host}:\n{launch.text}" for launch in each)

    def check_log(self) -> None:
        """Check that the log explains each generation, and that its ranks match its nodes."""
        log, starts = self.launches[0].text, self.starts()
        report = json.loads((self.folder / "report.json").read_text())
        resizes = {each["generation"]: each for each in report["resizes"]}
        sizes = [starts[0][1]]
        for generation in range(1, starts[-1][2] + 1):
            before, resize = sizes[-1], resizes.get(generation)
            runs, began = f"generation {generation} is running, ", "restart "
            if resize is not None:
                sizes.append(before - len(resize["left"]) + len(resize["joined"]))
                shapes = f"dp {before} -> {sizes[-1]}", f"dp={before} as before"
                assert resize["shapes"] in shapes, log
                runs = f"generation {generation} runs {_describe(resize)}; it took "
                began = f"generation {generation} started {_describe(resize)}, but ended before"
            else:
                sizes.append(before)
            has_run = generation in [start[2] for start in starts]
            assert runs in log or (began in log and not has_run), f"{runs!r} in:\n{log}"
        assert len(re.findall(r"generation \d+ (?:runs|started)", log)) <= len(sizes) - 1, log
        assert [start[1] for start in starts] == [sizes[start[2]] for start in starts], log
        whys = _RESTARTS.findall(log)
        assert [int(number) for number, _ in whys] == [*range(1, report["restarts"] + 1)], log
        assert all("was killed by SIGKILL" in why for _, why in whys), log
        assert len(whys) <= self.done["rank"], log
        left = Counter(host for each in report["resizes"] for host in each["left"])
        assert left <= Counter(f"node{host}" for host in self.lost), log


def _describe(resize: dict[str, Any]) -> str:
    who = [f"without {', '.join(resize['left'])}"] if resize["left"] else []
    who += [f"with {', '.join(resize['joined'])}"] if resize["joined"] else []
    return f"{' and '.join(who)}: {resize['shapes']}"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of all hosts share the cores; otherwise each would use all of them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def live(hosts: Hosts, folder: Path, *, seed: int, launches: int, events: int) -> None:
    """Train through faults in some launches, finish in another, and check every loss."""
    day = Day(hosts, folder, seed)
    for _ in range(launches):
        day.begin(day.chance.randint(2, day.nodes - 1))
        for _ in range(events // launches):
            day.happen()
        day.heal()
        day.stop()
    last = day.furthest() + 10
    day.begin(day.nodes, last)
    day.close(0)

    begun = [int(step) for step, _, _ in _STARTS.findall(day.printed)]
    hurt = curve(day.printed)
    unhurt = dict(curve(finish(1, folder / "unhurt", last)))
    assert begun == sorted(begun)
    assert {step for step, _ in hurt} == set(range(1, last + 1))
    for step, loss in hurt:
        assert loss == pytest.approx(unhurt[step], rel=tolerance(step)), f"step {step}"
    for what, took in sorted(day.took.items()):
        print(f"{what}: {len(took)} x {statistics.median(took):.2f} s, {max(took):.2f} s at most")


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_a_short_failing_day(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """On three hosts: one launch with faults, and one that finishes."""
    live(make_hosts(3), tmp_path, seed=1, launches=1, events=6)


@pytest.mark.nightly
@pytest.mark.timeout(120 + 30 * EVENTS)
def test_a_whole_failing_day(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """On four hosts: preempted four times, each time relaunched on other hosts."""
    live(make_hosts(4), tmp_path, seed=SEED, launches=4, events=EVENTS)
