"""Measurements of large layouts, each in its own process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from tests.benchmarks.commands import RANK_PROGRAM, Command, meshrun, python
from tests.benchmarks.processes import read_output
from tests.benchmarks.table import render_table

_PROGRAM = str(Path(__file__).with_name("layout_program.py"))


def layout(runs: int | None) -> str:
    """Measure queries for 16,384 ranks, plans of a million ranks and with domains, and an SVG."""
    tasks = [
        _asked("16,384 ranks: coordinate, place and group of each", "dp=256,pp=8,tp=8", 2048),
        _run("1,000,000 ranks: `--dry-run`", "dp=1250,pp=10,tp=80", 125_000),
        _run(
            "80,000 ranks on 10,000 nodes in domains: `--dry-run`",
            *("tp=64,dp=-1,pp=4", 10_000, "--nproc-per-node", "8"),
            *("--domain-size", "18", "--intra-domain", "tp", "--place", "auto"),
        ),
        _run("512 ranks: `--dry-run --format svg`", "dp=64,tp=8", 64, "--format", "svg"),
    ]
    found: dict[str, list[dict[str, float]]] = {task.name: [] for task in tasks}
    for _ in range(runs or 7):
        for task in tasks:
            found[task.name].append(json.loads(read_output(task)))
            print(f"{task.name}: {found[task.name][-1]}", file=sys.stderr, flush=True)
    rows = []
    for name, samples in found.items():
        seconds = [sample["seconds"] for sample in samples]
        peak = max(sample["mib"] for sample in samples)
        figures = (f"{figure:.2f}" for figure in (median(seconds), min(seconds), max(seconds)))
        rows.append((name, *figures, str(len(samples)), f"{peak:.0f}"))
    header = ("layout", "median, s", "min", "max", "runs", "peak, MiB")
    return render_table("Large layouts", header, rows)


def _asked(name: str, mesh: str, nodes: int) -> Command:
    return python(name, _PROGRAM, "ask", mesh, str(nodes))


def _run(name: str, mesh: str, nodes: int, *options: str) -> Command:
    plan = ("--mesh", mesh, "--nnodes", str(nodes), "--dry-run", *options, RANK_PROGRAM)
    return python(name, _PROGRAM, "run", *meshrun(name, *plan).argv)
