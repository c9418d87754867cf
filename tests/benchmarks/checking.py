"""What checks before a launch and observers during it cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.commands import RANK_PROGRAM, Command, meshrun, meshrun_ranks
from tests.benchmarks.processes import NotMeasured, read_output, time_to_end
from tests.benchmarks.table import Samples, render_samples
from tests.engines.hosts import Hosts, why_no_hosts

_HOSTS = 8
_WITHIN_S = 300.0
_PLAIN, _CHECK = "a launch", "--check quick"
_STEPS = 4000
_PROGRAM = str(Path(__file__).with_name("steps_program.py"))


def check(runs: int | None) -> str:
    """Measure what ``--check-first`` adds on one node, and ``--check quick`` on 8 of them."""
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
            _tell(f"{name}: {hosts[name][-1]:.2f} s")
    return "\n".join(
        (
            render_samples("A launch of 8 ranks on one node, checked first", "s", samples),
            render_samples(f"{_HOSTS} nodes with one rank each, whole commands", "s", hosts),
        )
    )


def observers(runs: int | None) -> str:
    """Measure the CPU time of launches with and without all that watches a launch.

    Two run at once: what disturbs the machine disturbs both. What observers delay costs CPU time
    too, as the steps are work, not time; what they take from a core that would idle counts as well.
    """
    repeats = read_output(_steps("calibrate", 0, 0)).strip()
    seconds: Samples = {"no observer": [], "all observers": []}
    added: Samples = {"all observers": []}
    with tempfile.TemporaryDirectory() as folder:
        watched = (
            *("--stragglers", "--hang-timeout", "60", "--metrics", "127.0.0.1:0"),
            *("--events", f"{folder}/events", "--node-history", f"{folder}/history"),
        )
        commands = [
            _steps("no observer", _STEPS, repeats),
            _steps("all observers", _STEPS, repeats, *watched),
        ]
        for _ in range(runs or 8):
            commands.reverse()  # none is always the first
            found = dict(zip((each.name for each in commands), _cpu_s(commands), strict=True))
            for name, value in found.items():
                seconds[name].append(value)
                _tell(f"{name}: {value:.2f} s")
            added["all observers"].append((found["all observers"] / found["no observer"] - 1) * 100)
    return "\n".join(
        (
            render_samples(f"2 ranks, {_STEPS} steps of 10 ms, CPU time of a launch", "s", seconds),
            render_samples("Of each two at once, added", "%", added),
        )
    )


def _steps(name: str, steps: int, repeats: object, *options: str) -> Command:
    """Return a launch of steps that are work of so many repeats; of 0 steps, it is found out."""
    ranks = ("--mesh", "2x1" if steps else "1x1", "--names", "dp,tp", "--device", "cpu")
    words = (*ranks, "--no-prefix", *options, _PROGRAM, str(steps), str(repeats))
    command = meshrun(name, *words)
    return replace(command, extra_environment={"OMP_NUM_THREADS": "1"})


def _cpu_s(commands: Sequence[Command]) -> list[float]:
    """Return the CPU time of each of some commands that run at once, their descendants' with it."""
    running = [
        subprocess.Popen(each.argv, env=each.environment, stdout=subprocess.DEVNULL)
        for each in commands
    ]
    found = []
    for process in running:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise NotMeasured(f"exit code {process.returncode}")
        found.append(used.ru_utime + used.ru_stime)
    return found


def _on_hosts(*words: str) -> float:
    """Return the seconds until the launchers on all hosts have ended."""
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
        if not {*codes} <= {0, 1}:  # 1: something was found
            raise NotMeasured(f"exit codes {codes}: {output.read()[-2000:]!r}")
    return seconds


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
