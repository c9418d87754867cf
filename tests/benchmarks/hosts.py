"""The cost of ``--hosts``, compared with the same launchers started by hand on each host."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, Any

from tests.benchmarks.nodes import PROGRAM
from tests.benchmarks.processes import NotMeasured
from tests.benchmarks.table import Samples, render_samples, render_table
from tests.engines.hosts import Hosts, why_no_hosts
from tests.engines.sshd import Sshd, why_no_sshd
from tests.kit import command

_COUNT = 4
_RUNS = 5
_WITHIN_S = 120.0
_WORDS = ("--mesh", f"{_COUNT}x1", "--names", "dp,tp", "--no-prefix")
_BY_HAND, _HOSTS = f"{_COUNT} launchers by hand", f"meshrun --hosts, {_COUNT} of them"
_Start = Callable[[IO[str]], list[subprocess.Popen[Any]]]


def hosts(runs: int | None) -> str:
    """Measure from the command to the mesh and to the exit, with one rank on each of 4 hosts."""
    if why := why_no_hosts() or why_no_sshd():
        raise NotMeasured(why)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = stack.enter_context(Hosts(_COUNT))
        folder.joinpath("ssh").mkdir(mode=0o700)
        sshd = Sshd(made, folder / "ssh")
        program = (PROGRAM, "mesh", f"{_COUNT}x1", str(folder))
        ways: dict[str, _Start] = {
            _BY_HAND: lambda out: [
                made.popen(host, command(*_at(), *_WORDS, *program), stdout=out)
                for host in range(_COUNT)
            ],
            _HOSTS: lambda out: [
                made.popen(0, command(*_named(sshd), *_WORDS, *program), stdout=out)
            ],
        }
        to_mesh: Samples = {name: [] for name in ways}
        to_end: Samples = {name: [] for name in ways}
        for _ in range(runs or _RUNS):
            for name, start in ways.items():
                mesh_s, end_s = _time(start, folder / "printed")
                to_mesh[name].append(mesh_s)
                to_end[name].append(end_s)
                print(f"{name}: {mesh_s:.2f} s, {end_s:.2f} s", file=sys.stderr, flush=True)
    return "\n".join(
        (
            render_samples(f"Command to mesh, {_COUNT} hosts", "s", to_mesh),
            render_samples(f"Command to end, {_COUNT} hosts", "s", to_end),
            render_table(
                "What --hosts adds, pair by pair",
                ("until", "median, s", "min", "max"),
                [("the mesh", *_differences(to_mesh)), ("the end", *_differences(to_end))],
            ),
        )
    )


def _at() -> tuple[str, ...]:
    return ("--nnodes", str(_COUNT), "--rdzv-endpoint", "node0:29500")


def _named(sshd: Sshd) -> tuple[str, ...]:
    return ("--ssh", sshd.ssh, "--hosts", sshd.all)


def _differences(samples: Samples) -> Sequence[str]:
    pairs = zip(samples[_HOSTS], samples[_BY_HAND], strict=True)
    found = sorted(ours - theirs for ours, theirs in pairs if ours is not None and theirs)
    return [f"{figure:.2f}" for figure in (median(found), found[0], found[-1])]


def _time(start: _Start, printed: Path) -> tuple[float, float]:
    """Return the seconds until every rank has its mesh, and until all launchers have exited.

    Raises:
        NotMeasured: If a launcher fails or a rank gets no mesh.
    """
    began_ns = time.monotonic_ns()
    with open(printed, "w") as out:
        launchers = start(out)
        codes = [launcher.wait(timeout=_WITHIN_S) for launcher in launchers]
    ended_ns = time.monotonic_ns()
    ready = list(map(int, re.findall(r"ready (\d+)", printed.read_text())))
    if any(codes) or len(ready) != _COUNT:
        raise NotMeasured(f"{len(ready)} of {_COUNT} ranks were ready, exit codes {codes}")
    return (max(ready) - began_ns) / 1e9, (ended_ns - began_ns) / 1e9
