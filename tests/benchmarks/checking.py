"""The cost of checks before a launch and of observers during it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

from meshrun.worker.answer_requests import THREAD
from tests.benchmarks.commands import RANK_PROGRAM, Command, meshrun, meshrun_ranks
from tests.benchmarks.processes import NotMeasured, read_output, time_to_end
from tests.benchmarks.table import Samples, render_samples
from tests.engines.hosts import Hosts, why_no_hosts

_HOSTS = 8
_WITHIN_S = 300.0
_PLAIN, _CHECK = "a launch", "--check quick"
_STEPS = 100_000
_SAMPLED_S = 60.0
_PROGRAM = str(Path(__file__).with_name("steps_program.py"))


def check(runs: int | None) -> str:
    """Measure what ``--check-first`` adds on one node, and ``--check quick`` on 8 nodes."""
    plain = meshrun_ranks(8, "reduce")
    checked = replace(
        plain,
        name="meshrun --check-first",
        argv=(*plain.argv[:3], "--check-first", *plain.argv[3:]),
    )
    samples: Samples = {"meshrun": [], checked.name: []}
    for _ in range(runs or 5):
        for command in (plain, checked):
            run = time_to_end(command)
            samples[command.name].append(None if run.exit_code else run.seconds)
    hosts: Samples = {_PLAIN: [], _CHECK: []}
    ways = {
        _PLAIN: ("--no-prefix", RANK_PROGRAM, "reduce", f"1x{_HOSTS}"),
        _CHECK: ("--check", "quick"),
    }
    for _ in range(runs or 3):
        for name, words in ways.items():
            hosts[name].append(_on_hosts(*words))
            _log(f"{name}: {hosts[name][-1]:.2f} s")
    return "\n".join(
        (
            render_samples("A launch of 8 ranks on one node, checked first", "s", samples),
            render_samples(f"{_HOSTS} nodes with one rank each, whole commands", "s", hosts),
        )
    )


def observers(runs: int | None) -> str:
    """Measure the CPU time of observing two busy ranks: in the launcher and a thread in each rank.

    The wall time of steps varies by more than that.
    """
    repeats = read_output(_steps("calibrate", 0, 0)).strip()
    launcher: Samples = {"no observer": [], "all observers": []}
    threads: Samples = {"no observer": [], "all observers": []}
    for _ in range(runs or 5):
        with tempfile.TemporaryDirectory() as folder:
            watched = (
                *("--stragglers", "--hang-timeout", "60", "--metrics", "127.0.0.1:0"),
                *("--events", f"{folder}/events", "--node-history", f"{folder}/history"),
            )
            for name, options in (("no observer", ()), ("all observers", watched)):
                used = _used_by_observers(_steps(name, _STEPS, repeats, *options))
                launcher[name].append(used[0])
                threads[name].append(used[1])
                _log(f"{name}: launcher {used[0]:.3f} %, a rank's thread {used[1]:.3f} %")
    return "\n".join(
        (
            render_samples("Launcher of 2 ranks", "% of a core", launcher, digits=3),
            render_samples("A thread in each rank", "% of a core", threads, digits=3),
        )
    )


def _steps(name: str, steps: int, repeats: object, *options: str) -> Command:
    """Return a launch of steps with ``repeats`` units of work; 0 steps calibrate ``repeats``."""
    ranks = ("--mesh", "2x1" if steps else "1x1", "--names", "dp,tp", "--device", "cpu")
    words = (*ranks, "--no-prefix", *options, _PROGRAM, str(steps), str(repeats))
    command = meshrun(name, *words)
    return replace(command, extra_environment={"OMP_NUM_THREADS": "1"})


def _used_by_observers(command: Command) -> tuple[float, float]:
    """Return the use of the launcher and of a rank's thread while ranks work, in % of a core."""
    with subprocess.Popen(
        command.argv,
        env=command.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "up\n":
                raise NotMeasured("the program did not start")
            began, before = time.monotonic(), _cpu_ns(process.pid)
            time.sleep(_SAMPLED_S)
            after, seconds = _cpu_ns(process.pid), time.monotonic() - began
        finally:
            process.terminate()
    launcher, threads = ((b - a) / seconds / 1e7 for a, b in zip(before, after, strict=True))
    return launcher, threads / 2


def _cpu_ns(launcher: int) -> tuple[int, int]:
    """Return the CPU time of a launcher and of its ranks' observer threads."""
    threads = 0
    for process in psutil.Process(launcher).children(recursive=True):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == THREAD:
                threads += _scheduled_ns(task)
    return sum(map(_scheduled_ns, Path(f"/proc/{launcher}/task").iterdir())), threads


def _scheduled_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


def _on_hosts(*words: str) -> float:
    """Return the seconds until the launchers on all hosts have exited."""
    if (why := why_no_hosts()) is not None:
        raise NotMeasured(why)
    mesh = ("--mesh", f"1x{_HOSTS}", "--names", "dp,tp", "--nproc-per-node", "1", "--device", "cpu")
    meet = ("--nnodes", str(_HOSTS), "--rdzv-endpoint", "node0:29500")
    command = meshrun("meshrun", *mesh, *meet, *words)
    with tempfile.TemporaryFile() as output, Hosts(_HOSTS) as hosts:
        began = time.perf_counter()
        launchers = [
            hosts.popen(node, command.argv, stdout=output, stderr=output) for node in range(_HOSTS)
        ]
        codes = [each.wait(timeout=_WITHIN_S) for each in launchers]
        seconds = time.perf_counter() - began
        output.seek(0)
        if not {*codes} <= {0, 1}:  # 1: the check found something
            raise NotMeasured(f"exit codes {codes}: {output.read()[-2000:]!r}")
    return seconds


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
