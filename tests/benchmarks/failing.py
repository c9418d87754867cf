"""Measurements of launches in which a rank dies."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.commands import SHAPES, Command, meshrun, torchrun
from tests.benchmarks.processes import NotMeasured, time_to_end
from tests.benchmarks.table import Samples, render_samples

_PROGRAM = str(Path(__file__).with_name("fail_program.py"))
_RANKS = 8


def restart(runs: int | None) -> str:
    """Measure from the death of one of 8 ranks until all pass a barrier of the next generation."""
    samples: Samples = {"meshrun": [], "torchrun": []}
    for _ in range(runs or 5):
        for name, times in _play("again", "1").items():
            died, again = times["dies"][0], times.get("again", [])
            took_s = (max(again) - died) / 1e9 if len(again) == _RANKS else None
            samples[name].append(took_s)
    return render_samples("From a kill to the next generation's barrier, 8 ranks", "s", samples)


def signalled(runs: int | None) -> str:
    """Measure from the death of one of 8 ranks until the last of the others gets a signal."""
    samples: Samples = {"meshrun": [], "torchrun": []}
    for _ in range(runs or 5):
        for name, times in _play("signalled", "0").items():
            others = times.get("signalled", [])
            took_ms = (max(others) - times["dies"][0]) / 1e6 if len(others) == _RANKS - 1 else None
            samples[name].append(took_ms)
    return render_samples(
        "From a rank's death to the signal at all others", "ms", samples, digits=1
    )


def _play(what: str, max_restarts: str) -> Mapping[str, dict[str, list[int]]]:
    """Run both launchers once; return the times of each event by launcher."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            launch.name: _times(launch, Path(launch.argv[-1]))
            for launch in _commands(Path(folder), what, max_restarts)
        }


def _commands(folder: Path, what: str, max_restarts: str) -> list[Command]:
    shape = SHAPES[_RANKS]
    words = ("--max-restarts", max_restarts, _PROGRAM, what, shape)
    mesh = ("--mesh", shape, "--names", "dp,tp")
    theirs = ("--standalone", "--nproc-per-node", str(_RANKS))
    # By default all generations share a store, with which torchrun's restarts fail (issue 167288).
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ours = meshrun("meshrun", *mesh, *words, str(folder / "ours"))
    other = torchrun("torchrun", *theirs, *words, str(folder / "theirs"))
    return [ours, Command(other.name, other.argv, fresh_store)]


def _times(launch: Command, log: Path) -> dict[str, list[int]]:
    log.write_text("")
    time_to_end(launch)
    found: dict[str, list[int]] = {}
    for line in log.read_text().splitlines():
        what, _, at_ns = line.split()
        found.setdefault(what, []).append(int(at_ns))
    if "dies" not in found:
        raise NotMeasured(f"{launch.name}: no rank died")
    return found
