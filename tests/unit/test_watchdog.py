"""When a start stalls and when ranks hang, with a simulated clock and simulated CPU times."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor
from meshrun.lifecycle.phases import Stop
from meshrun.lifecycle.state import State
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited
from meshrun.supervisor import watchdog
from meshrun.supervisor.monitor import Monitor
from meshrun.supervisor.watchdog import Watchdog
from tests.plans import plan_of

S = 1_000_000_000


class World:
    """Two ranks, processes 10 and 11, whose CPU time the test sets."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.cpu = {10: 0.0, 11: 0.0}
        self.checks = 0
        self.is_held_up = False
        ranks = {rank: RankState(pid=10 + rank, ready_ns=0) for rank in (0, 1)}
        self.state = State(shutdown_timeout_s=1, ranks=ranks)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def seconds(self, pids: Iterable[int]) -> dict[int, float]:
        self.checks += 1
        return {pid: self.cpu[pid] for pid in pids}

    def pass_time(self, dog: Watchdog, seconds: float, *, cpu: float = 0.0) -> float | None:
        """Check whenever the watchdog is due; rank 1 uses this share of a core meanwhile."""
        until_ns = self.now_ns + int(seconds * S)
        while True:
            at_ns = dog.next_check_ns(self.state)
            if at_ns is None or at_ns > until_ns:
                self.cpu[11] += cpu * (until_ns - self.now_ns) / S
                self.now_ns = until_ns
                return None
            at_ns = max(at_ns, self.now_ns)
            self.cpu[11] += cpu * (at_ns - self.now_ns) / S
            self.now_ns = at_ns
            if (idle_s := dog.hung_for_s(self.state)) is not None:
                return idle_s


@pytest.fixture
def world() -> World:
    return World()


def test_ranks_in_a_debugger_do_not_hang(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone is looking at them."""
    traced = {11}
    monkeypatch.setattr(watchdog, "is_traced", traced.__contains__)
    watch = dog(world, hang_s=10)
    assert world.pass_time(watch, 60) is None
    traced.clear()
    assert world.pass_time(watch, 60) == pytest.approx(10, abs=2)


def test_skipped_time_counts_for_no_limit(world: World) -> None:
    """Ranks that were stopped with the launcher neither hang nor stall."""
    watch, start = dog(world, hang_s=10), dog(world, start_s=10)
    starting = replace(world.state, ranks={0: RankState(pid=10)})
    assert world.pass_time(watch, 6) is None
    world.now_ns += 100 * S
    for each in (watch, start):
        each.skip(100 * S)

    assert not start.must_report_stall(starting)
    assert world.pass_time(watch, 3) is None
    assert world.pass_time(watch, 4) == pytest.approx(10, abs=2)
    assert start.must_report_stall(starting)


def test_ranks_that_are_held_up_do_not_hang(world: World) -> None:
    """The others may wait for the one that asks."""
    watch = dog(world, hang_s=10)
    world.is_held_up = True
    assert world.pass_time(watch, 60) is None
    world.is_held_up = False
    assert world.pass_time(watch, 60) == pytest.approx(10, abs=2)


def dog(world: World, *, hang_s: float = 0.0, start_s: float = 0.0) -> Watchdog:
    return Watchdog(
        start_timeout_s=start_s,
        hang_timeout_s=hang_s,
        now_ns=world.monotonic_ns,
        cpu_seconds=world.seconds,
        is_held_up=lambda: world.is_held_up,
    )


def test_it_checks_nothing_unless_asked(world: World) -> None:
    idle = dog(world)

    assert world.pass_time(idle, 10_000) is None
    assert idle.next_check_ns(world.state) is None
    assert world.checks == 0


@pytest.mark.parametrize(
    ("share", "hangs"), [(0.0, True), (0.006, True), (0.05, False), (1, False)]
)
def test_cpu_time_counts_as_work_from_two_percent_on(
    world: World, share: float, hangs: bool
) -> None:
    """Ranks that wait in gloo use 0.6 %."""
    watch = dog(world, hang_s=60)
    idle_s = world.pass_time(watch, 300, cpu=share)

    assert (idle_s is not None) is hangs
    if idle_s is not None:
        assert 60 <= idle_s < 70


def test_output_counts_as_progress_and_so_does_a_heartbeat(world: World) -> None:
    """Each restarts the timeout; after a rank's first heartbeat only heartbeats do."""
    watch = dog(world, hang_s=60)
    for _ in range(3):
        assert world.pass_time(watch, 50) is None
        watch.record_output(0)
    for _ in range(3):
        assert world.pass_time(watch, 50) is None
        watch.beat(1)
    assert world.pass_time(watch, 50, cpu=1) is None
    watch.record_output(1)
    idle_s = world.pass_time(watch, 50, cpu=1)

    assert idle_s is not None


def test_ranks_that_are_being_stopped_do_not_hang(world: World) -> None:
    watch = dog(world, hang_s=60)
    world.state = replace(world.state, stop=Stop.ASKED)

    assert world.pass_time(watch, 300) is None


def test_a_start_that_stalls_is_reported_once(world: World) -> None:
    """And again in the next generation."""
    watch = dog(world, start_s=5)
    world.state = replace(world.state, ranks={0: RankState(pid=10), 1: RankState()})
    world.now_ns = 4 * S
    assert not watch.must_report_stall(world.state)
    world.now_ns = 5 * S
    assert watch.must_report_stall(world.state)
    assert not watch.must_report_stall(world.state)
    assert watch.next_check_ns(world.state) is None
    watch.begin()
    world.now_ns = 11 * S
    assert watch.must_report_stall(world.state)


def test_a_start_that_failed_does_not_stall(world: World) -> None:
    """A rank that ended before its program began is not waited for."""
    watch = dog(world, start_s=5)
    ended = RankExited(rank=0, pid=10, wait_status=256, at_ns=0)
    world.state = replace(
        world.state, ranks={0: RankState(pid=10, exited=ended), 1: RankState(pid=11, ready_ns=0)}
    )
    world.now_ns = 9 * S

    assert not watch.must_report_stall(world.state)


@pytest.mark.parametrize(("places", "hangs"), [(["a"], True), (["a", "b"], False), ([""], False)])
def test_a_rank_that_spins_in_a_collective_makes_no_progress(
    world: World, places: list[str], *, hangs: bool
) -> None:
    """Its CPU time counts only if it has got further since the previous check."""
    watch = dog(world, hang_s=8)
    idle_s = None
    for second in range(40):
        watch.record_wait(1, places[second % len(places)])
        idle_s = idle_s or world.pass_time(watch, 1, cpu=1.0)

    assert (idle_s is not None) == hangs


def test_a_rank_that_no_longer_answers_is_not_taken_to_spin(world: World) -> None:
    """It may be computing and holding the GIL."""
    watch = dog(world, hang_s=8)
    watch.record_wait(1, "a")
    watch.record_wait(1, "a")

    assert world.pass_time(watch, 100, cpu=1.0) is None


def test_a_hang_is_reported_without_haste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While native stacks are being collected, the launcher sleeps."""
    native = tmp_path / "py-spy"
    native.write_text("#!/bin/sh\nexec sleep 100\n")
    native.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    reactor = Reactor()
    rank = subprocess.Popen(["sleep", "100"])
    null = os.open(os.devnull, os.O_WRONLY)
    plan, console = plan_of(hang_timeout="0.4"), Console(null, null)
    monitor = Monitor(plan, console, reactor, emit=lambda _: None)
    try:
        ranks = {0: RankState(pid=rank.pid, ready_ns=1)}
        monitor.begin(reactor, State(shutdown_timeout_s=1.0, ranks=ranks))
        reactor.run_until(lambda: monitor.stacks.is_under_way)
        reactor.run_until(lambda: not monitor.stacks.awaits_answers)

        assert monitor.stacks.is_under_way
        assert reactor.next_ns is None
    finally:
        monitor.close()
        reactor.close()
        os.close(null)
        rank.kill()
        rank.wait()
