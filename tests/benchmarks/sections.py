"""The measurements, each a function from a number of runs to a Markdown table."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks import (
    checking,
    failing,
    guarding,
    hosts,
    layouts,
    nodes,
    printing,
    standing,
    warming,
)
from tests.benchmarks.commands import (
    RANK_PROGRAM,
    Command,
    accelerate_ranks,
    import_torch,
    meshrun,
    meshrun_ranks,
    mpirun_ranks,
    python,
    torchrun,
    torchrun_ranks,
)
from tests.benchmarks.processes import (
    cpu_seconds,
    gate,
    idle_ranks,
    pss_bytes,
    read_output,
    time_to_end,
    tree,
)
from tests.benchmarks.table import Samples, render_samples, render_table

CPU_WINDOW_S = 30.0
STALL_S = 4.0
"""A run this much above the median contains a DNS lookup that hit its timeout of 5 s."""
_MIB = 1024 * 1024


def wall8(runs: int | None) -> str:
    """Measure 8 ranks, alongside torchrun's two modes and the lower bound."""
    commands = [
        meshrun_ranks(8, "reduce"),
        torchrun_ranks(8, "reduce"),
        torchrun_ranks(8, "reduce", fork=True),
        import_torch(),
    ]
    return _wall("Wall time, 8 ranks", commands, [runs or 7] * 4)


def launchers(runs: int | None) -> str:
    """Measure 8 ranks, alongside other launchers."""
    commands = [
        meshrun_ranks(8, "reduce"),
        torchrun_ranks(8, "reduce"),
        accelerate_ranks(8, "reduce"),
        mpirun_ranks(8, "reduce"),
    ]
    return _wall("Wall time of launchers, 8 ranks", commands, [runs or 5] * 4)


def wall32(runs: int | None) -> str:
    """Measure 32 ranks."""
    commands = [meshrun_ranks(32, "reduce"), torchrun_ranks(32, "reduce")]
    return _wall("Wall time, 32 ranks", commands, [runs or 3] * 2)


def wall64(runs: int | None) -> str:
    """Measure 64 ranks; torchrun gets fewer runs, as it takes over a minute."""
    commands = [meshrun_ranks(64, "reduce"), torchrun_ranks(64, "reduce")]
    return _wall("Wall time, 64 ranks", commands, [runs or 5, runs or 2])


def stalls(runs: int | None) -> str:
    """Count launches of 64 ranks in which a DNS lookup delayed a rank."""
    samples = _time_rounds([meshrun_ranks(64, "reduce")], [runs or 20])["meshrun"]
    good = [seconds for seconds in samples if seconds is not None]
    if not good:
        return render_table("Stalls, 64 ranks", ("runs", "failed"), [(str(len(samples)),) * 2])
    middle = median(good)
    late = sum(seconds > middle + STALL_S for seconds in good)
    header = ("runs", "failed", "median, s", "max, s", f"above median + {STALL_S:g} s")
    failed = str(len(samples) - len(good))
    row = (str(len(samples)), failed, f"{middle:.2f}", f"{max(good):.2f}", str(late))
    return render_table("Stalls, 64 ranks", header, [row])


def memory(runs: int | None) -> str:
    """Measure the memory of 8 idle ranks and their launcher's processes.

    Pages shared with other programs on the machine, such as another torch, count less.
    """

    def measure(launch: Callable[..., Command]) -> float:
        with gate() as held, idle_ranks(launch(8, "idle", held.path), 8, held) as launcher:
            return sum(pss_bytes(pid) for pid in tree(launcher)) / _MIB

    samples = _idle_rounds(runs or 3, measure)
    return render_samples("Memory, 8 idle ranks and their launcher (PSS)", "MiB", samples, digits=0)


def cpu(runs: int | None) -> str:
    """Measure a launcher's CPU time while its ranks sleep, and that of all processes."""
    whole: Samples = {"meshrun": [], "torchrun": []}

    def measure(launch: Callable[..., Command]) -> float:
        with gate() as held:
            command = launch(8, "idle", held.path)
            with idle_ranks(command, 8, held) as launcher:
                pids = tree(launcher)
                before = {pid: cpu_seconds(pid) for pid in pids}
                time.sleep(CPU_WINDOW_S)
                used = {pid: (cpu_seconds(pid) - before[pid]) * 1000 for pid in pids}
        whole[command.name].append(sum(used.values()))
        return used[pids[0]]

    alone = _idle_rounds(runs or 3, measure)
    title = f"CPU time in {CPU_WINDOW_S:g} s while 8 ranks sleep"
    return "\n".join(
        (
            render_samples(f"{title}: the launcher process", "ms", alone, digits=0),
            render_samples(f"{title}: all processes", "ms", whole, digits=0),
        )
    )


def cli(runs: int | None) -> str:
    """Measure commands that start no ranks."""
    count = runs or 7
    dry = ("--dry-run", RANK_PROGRAM)
    plans = [
        meshrun("8 ranks", "--mesh", "2x4", "--names", "dp,tp", *dry),
        meshrun("16384 ranks", "--mesh", "dp=2048,tp=8", "--nnodes", "2048", *dry),
    ]
    helps = [meshrun("meshrun", "--help"), torchrun("torchrun", "--help")]
    return "\n".join(
        (
            _wall("Wall time of --help", helps, [count] * 2),
            _wall("Wall time of meshrun --dry-run", plans, [count] * 2),
        )
    )


def ends(runs: int | None) -> str:
    """Count the ranks that exit with their own status while a global still holds the mesh.

    The last row is a control: there, Python itself ends ranks that share nothing, which is known
    to abort some of them, to show that the count would notice.
    """
    launches, ranks = runs or 25, 8
    driver = str(Path(__file__).with_name("own_status.py"))
    keep = python("mesh kept", driver, "fork", RANK_PROGRAM, "keep", "2x4")
    destroy = python("mesh kept, group destroyed", driver, "fork", RANK_PROGRAM, "destroy", "2x4")
    control = Command(
        "mesh kept, without meshrun's own end",
        (sys.executable, driver, "exec", RANK_PROGRAM, "keep", "2x4"),
        {"MESHRUN_FULL_EXIT": "1"},
    )
    commands = [keep, destroy, control]
    counts = [launches, launches, min(launches, 5)]
    others: dict[str, Counter[str]] = {command.name: Counter() for command in commands}
    for command in _in_turn(commands, counts):
        found = json.loads(read_output(command))
        others[command.name].update(found)
        _log(f"{command.name}: {ranks - len(found)} of {ranks}")
    rows = []
    for command, count in zip(commands, counts, strict=True):
        ways = others[command.name]
        listed = ", ".join(f"{times} by {way}" for way, times in ways.most_common()) or "-"
        own = count * ranks - sum(ways.values())
        rows.append((command.name, str(own), str(count * ranks), listed))
    header = ("end of the program", "own status", "ranks", "others")
    return render_table("Ranks that ended with their own status", header, rows)


_ALL = (
    *(wall8, launchers, wall32, wall64, stalls, memory, cli, cpu, ends),
    *(failing.restart, failing.signalled, guarding.killed, guarding.report, guarding.stacks),
    *(printing.output, printing.slow, layouts.layout, standing.standing, warming.warm),
    *(checking.check, checking.observers),
    *(nodes.nodes, nodes.stop, nodes.silence, nodes.lost, nodes.rendezvous, hosts.hosts),
)
SECTIONS: dict[str, Callable[[int | None], str]] = {section.__name__: section for section in _ALL}
"""In the order of measurement."""


def _wall(title: str, commands: Sequence[Command], counts: Sequence[int]) -> str:
    return render_samples(title, "s", _time_rounds(commands, counts))


def _time_rounds(commands: Sequence[Command], counts: Sequence[int]) -> Samples:
    samples: Samples = {command.name: [] for command in commands}
    for command in _in_turn(commands, counts):
        run = time_to_end(command)
        _log(f"{command.name}: {run.seconds:.2f} s, exit code {run.exit_code}")
        samples[command.name].append(None if run.exit_code else run.seconds)
    return samples


def _idle_rounds(runs: int, measure: Callable[[Callable[..., Command]], float]) -> Samples:
    samples: Samples = {"meshrun": [], "torchrun": []}
    for _ in range(runs):
        for name, launch in (("meshrun", meshrun_ranks), ("torchrun", torchrun_ranks)):
            samples[name].append(measure(launch))
            _log(f"{name}: {samples[name][-1]:.0f}")
    return samples


def _in_turn(commands: Sequence[Command], counts: Sequence[int]) -> Iterator[Command]:
    """Yield A B C A B C ..., each command as many times as its count."""
    for turn in range(max(counts)):
        for command, count in zip(commands, counts, strict=True):
            if turn < count:
                yield command


def _log(text: str) -> None:
    """Print progress to stderr, as the tables on stdout may go to a file."""
    print(text, file=sys.stderr, flush=True)
