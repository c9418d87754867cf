"""What checks before a launch and observers during it cost."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.commands import RANK_PROGRAM, meshrun, meshrun_ranks
from tests.benchmarks.processes import NotMeasured, time_to_end
from tests.benchmarks.table import Samples, render_samples
from tests.engines.hosts import Hosts, why_no_hosts

_HOSTS = 8
_WITHIN_S = 300.0
_PLAIN, _CHECK = "a launch", "--check quick"
_STEPS = 2000
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
    """Measure a step of 10 ms with and without all that watches a launch."""
    samples: Samples = {"no observer": [], "all observers": []}
    with tempfile.TemporaryDirectory() as folder:
        watched = (
            *("--stragglers", "--hang-timeout", "60", "--metrics", "127.0.0.1:0"),
            *("--events", f"{folder}/events", "--node-history", f"{folder}/history"),
        )
        for _ in range(runs or 6):
            for name, options in (("no observer", ()), ("all observers", watched)):
                samples[name].append(_step_ms(options))
                _tell(f"{name}: {samples[name][-1]} ms")
    return render_samples("A step of 10 ms, 2 ranks on 2 cores", "ms", samples, digits=3)


def _step_ms(options: tuple[str, ...]) -> float:
    words = ("--mesh", "2x1", "--names", "dp,tp", "--no-prefix", "--device", "cpu", *options)
    command = meshrun("meshrun", *words, _PROGRAM, str(_STEPS))
    ran = subprocess.run(
        command.argv,
        env={**command.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    found = re.search(r"^step ([\d.]+) ms$", ran.stdout, re.MULTILINE)
    if found is None:
        raise NotMeasured(f"exit code {ran.returncode}: {ran.stderr[-2000:]}")
    return float(found[1])


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
