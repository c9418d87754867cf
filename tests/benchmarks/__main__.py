"""``python -m tests.benchmarks``: measure meshrun alongside torchrun and print Markdown tables."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.commands import python
from tests.benchmarks.processes import (
    NotMeasured,
    adopt_orphans,
    end_everything,
    read_output,
    stop_on_signals,
)
from tests.benchmarks.sections import SECTIONS


def main() -> int:
    """Measure the requested sections, and always end what is still running."""
    arguments = _parser().parse_args()
    adopt_orphans()
    stop_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # torchrun leaves a folder there at each launch
        try:
            return _measure(arguments.only, runs=arguments.runs, stalls=arguments.stalls)
        finally:
            end_everything()


def _measure(names: list[str], *, runs: int | None, stalls: int) -> int:
    print(_machine(), flush=True)
    missing = 0
    for name in names:
        try:
            table = SECTIONS[name](stalls if name == "stalls" else runs)
        except (NotMeasured, OSError) as error:  # the other sections are still useful
            table = f"## {name}: not measured\n\n{error}\n"
            missing += 1
            end_everything()
        print(f"\n{table}", end="", flush=True)
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--runs",
        type=_positive,
        metavar="N",
        help="runs of each command, except in stalls (default: depends on the section)",
    )
    parser.add_argument(
        "--stalls",
        type=_positive,
        default=20,
        metavar="N",
        help="launches of 64 ranks in which to look for stalls (default: 20)",
    )
    parser.add_argument(
        "--only",
        type=_sections,
        default=list(SECTIONS),
        metavar="A,B",
        help=f"sections, out of {','.join(SECTIONS)}",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _sections(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := [name for name in asked if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}")
    return [name for name in SECTIONS if name in asked]


def _machine() -> str:
    """Describe the machine; importing torch also loads its files into the page cache."""
    version = read_output(python("torch", "-c", "import torch; print(torch.__version__)")).strip()
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{cores} cores, {_cpu_model()}, Python {platform.python_version()}, torch {version},"
        f" load average {load:.2f} at the start"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
