"""Measurements on several nodes, each a host with its own network, name and addresses."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.benchmarks.commands import Command, meshrun, torchrun
from tests.benchmarks.neighbours import room_for_neighbours
from tests.benchmarks.processes import NotMeasured, pss_bytes
from tests.benchmarks.table import Samples, render_samples, render_table
from tests.engines.hosts import Hosts, why_no_hosts

PROGRAM = str(Path(__file__).with_name("nodes_program.py"))
_WITHIN_S = 400.0
_GIVE_UP_S = 30.0
_NODE_TIMEOUT_S = 5
_SEVERAL, _MANY = 16, 64
_FEW, _SOME = 2, 6
_LAST_CALL_S = 5
"""How long the coordinator waits for more nodes than the minimum."""
_ROOM = 0.85
"""The share of available memory that nodes may use."""
OnNode = Callable[[int], Command]
"""Returns the command for a node, given its number."""


def nodes(runs: int | None) -> str:
    """Measure from the command to the mesh, on 2 nodes with 4 ranks each and on one with 8."""
    ways: dict[str, tuple[int, OnNode]] = {
        "meshrun, one node": (1, lambda _: _ours("mesh", "2x4", 1)),
        "meshrun, static": (2, lambda _: _ours("mesh", "2x4", 2)),
        "meshrun, c10d": (2, lambda _: _ours("mesh", "2x4", 2, "--rdzv-backend", "c10d")),
        "torchrun, static": (2, lambda node: _theirs_static("mesh", "2x4", 2, 4, node)),
        "torchrun, c10d": (2, lambda _: _theirs("mesh", "2x4", 2, 4)),
    }
    samples: Samples = {name: [] for name in ways}
    for _ in range(runs or 5):
        for name, (count, on_node) in ways.items():
            with _launched(count, on_node, ranks=8) as launch:
                samples[name].append(launch.to_mesh_s)
                _log(f"{name}: {launch.to_mesh_s:.2f} s")
    return render_samples("Command to mesh, 8 ranks on 2 nodes", "s", samples)


def stop(runs: int | None) -> str:
    """Measure from the exit of a rank on node 1 until both launchers have exited."""

    def strike(launch: _Launched) -> int:
        (launch.folder / "go").touch()
        exited = launch.folder / "exit"
        while not (exited.exists() and exited.read_text()):
            time.sleep(0.001)
        return int(exited.read_text())

    rows = _ends("stop", runs or 5, strike, ())
    return render_table("From a rank's exit to the end of all launchers, 2 nodes", _HEADER, rows)


def silence(runs: int | None) -> str:
    """Measure from a cut of the link between two nodes until both launchers have exited."""

    def strike(launch: _Launched) -> int:
        launch.hosts.cut(1)
        return time.monotonic_ns()

    rows = _ends("stay", runs or 5, strike, ("--node-timeout", str(_NODE_TIMEOUT_S)))
    title = f"From a cut to the end of all launchers, 2 nodes, --node-timeout {_NODE_TIMEOUT_S}"
    return render_table(title, _HEADER, rows)


def lost(runs: int | None) -> str:
    """Measure from the loss of one of 3 nodes until the others pass the next mesh's barrier."""
    conf = ("--rdzv-conf", f"last_call_timeout={_LAST_CALL_S}", "--max-restarts", "9")
    elastic = ("--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", *conf)
    elastic += ("--rdzv-endpoint", "node0:29500", "--rdzv-id", "bench")
    program = (PROGRAM, "lost", "-1x1", "FOLDER")
    ours = ("--mesh", "dp=-1,tp=1", "--no-prefix", *elastic, *program)
    ways = {
        "meshrun": (runs or 7, meshrun("meshrun", *ours)),
        "torchrun, c10d": (min(runs or 7, 3), torchrun("torchrun", *elastic, *program)),
    }
    samples: Samples = {name: [] for name in ways}
    for name, (count, command) in ways.items():
        for _ in range(count):
            with _launched(3, lambda _, command=command: command, ranks=3) as launch:  # type: ignore[misc]
                since_ns = time.monotonic_ns()
                launch.hosts.kill_all(1)
                samples[name].append((launch.wait_ready(5) - since_ns) / 1e9)
                _log(f"{name}: {samples[name][-1]:.2f} s")
    title = "From the loss of one of 3 nodes until the others are past the next mesh's barrier"
    return render_samples(title, "s", samples)


def rendezvous(runs: int | None) -> str:
    """Measure from the commands to the mesh, on many nodes with one rank each.

    Instead of 64 nodes, fewer are used if memory is short. A launch whose ranks have no mesh in
    time counts as failed.
    """
    ways: dict[str, Callable[[int], OnNode]] = {
        "meshrun, static": lambda count: lambda _: _ours("mesh", f"{count}x1", count),
        "meshrun, c10d": lambda count: (
            lambda _: _ours("mesh", f"{count}x1", count, "--rdzv-backend", "c10d")
        ),
        "torchrun, c10d": lambda count: lambda _: _theirs("mesh", f"{count}x1", count, 1),
    }
    fits = min(_fitting(way) for way in ways.values())
    return "\n".join(_meet(count, runs or 1, ways) for count in (_SEVERAL, min(_MANY, fits)))


def _meet(count: int, runs: int, ways: Mapping[str, Callable[[int], OnNode]]) -> str:
    samples: Samples = {name: [] for name in ways}
    with room_for_neighbours(count):
        for name, way in runs * list(ways.items()):
            to_mesh_s = None
            try:
                with _launched(count, way(count), ranks=count) as launch:
                    to_mesh_s = launch.to_mesh_s
            except NotMeasured as error:
                _log(f"{name}: {error}")
            samples[name].append(to_mesh_s)
            _log(f"{name}, {count} nodes: {to_mesh_s}")
    return render_samples(f"Command to mesh, {count} nodes with one rank each", "s", samples)


_HEADER = ("launcher", "median, s", "min", "max", "runs")


def _ends(
    what: str, runs: int, strike: Callable[[_Launched], int], words: Sequence[str]
) -> list[tuple[str, ...]]:
    ways: dict[str, tuple[int, OnNode]] = {
        "meshrun": (runs, lambda _: _ours(what, "2x2", 2, *words)),
        "torchrun, c10d": (min(runs, 2), lambda _: _theirs(what, "2x2", 2, 2)),
    }
    rows = []
    for name, (count, on_node) in ways.items():
        took: list[float | None] = []
        for _ in range(count):
            with _launched(2, on_node, ranks=4) as launch:
                took.append(launch.wait_ended(strike(launch)))
            _log(f"{name}: {took[-1]}")
        ended = sorted(seconds for seconds in took if seconds is not None)
        shown = (
            [f"{figure:.2f}" for figure in (median(ended), ended[0], ended[-1])] if ended else []
        )
        if len(ended) < count:
            shown = [f"> {_GIVE_UP_S:g}"] * 3
        rows.append((name, *shown, str(count)))
    return rows


def _fitting(way: Callable[[int], OnNode]) -> int:
    """Return how many nodes fit into memory, extrapolated from two small launches."""
    few, some = (_memory(way(count), count) for count in (_FEW, _SOME))
    further = (some - few) / (_SOME - _FEW)
    fits = _FEW + int((_ROOM * psutil.virtual_memory().available - few) / further)
    _log(f"{further / 1024**2:.0f} MiB for each further node, room for {fits} nodes")
    return fits


def _memory(on_node: OnNode, count: int) -> int:
    """Return the memory in bytes that ``count`` nodes use, counting shared pages once."""

    def stays(node: int) -> Command:
        command = on_node(node)
        argv = tuple("stay" if word == "mesh" else word for word in command.argv)
        return Command(command.name, argv)

    with _launched(count, stays, ranks=count) as launch:
        pids = [pid for host in range(count) for pid in launch.hosts.processes(host)]
        return sum(pss_bytes(pid) for pid in pids)


class _Launched:
    """Launchers on hosts whose ranks have their mesh."""

    def __init__(self, hosts: Hosts, folder: Path, launchers: list[subprocess.Popen[Any]]) -> None:
        self.hosts, self.folder, self._launchers = hosts, folder, launchers
        self.to_mesh_s = 0.0

    def wait_ready(self, ranks: int) -> int:
        """Wait until this many ranks have used their mesh; return when the last one did (ns)."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            ended = [each.poll() for each in self._launchers]
            times = re.findall(r"ready (\d+)\n", self._read("printed"))
            if len(times) >= ranks:
                return max(map(int, times))
            is_over = None not in ended or any(code not in (None, 0, -9) for code in ended)
            if time.monotonic() > deadline or is_over:
                errors = self._read("errors")[-2000:]
                raise NotMeasured(f"{len(times)} of {ranks} ranks, exit codes {ended}:\n{errors}")
            time.sleep(0.02)

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait_ended(self, since_ns: int) -> float | None:
        """Return the seconds until every launcher has exited; ``None`` if some do not."""
        deadline = time.monotonic() + _GIVE_UP_S
        while any(each.poll() is None for each in self._launchers):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        return (time.monotonic_ns() - since_ns) / 1e9


@contextmanager
def _launched(count: int, on_node: OnNode, *, ranks: int) -> Iterator[_Launched]:
    """Start launchers on ``count`` hosts, wait for every mesh, and finally end all."""
    if (why := why_no_hosts()) is not None:
        raise NotMeasured(why)
    with tempfile.TemporaryDirectory() as text, Hosts(count) as hosts:
        folder, launchers = Path(text), []
        printed = folder / "printed"
        began_ns = time.monotonic_ns()
        with open(printed, "ab") as output, open(folder / "errors", "ab") as errors:
            for node in range(count):
                command = on_node(node)
                argv = [text if word == "FOLDER" else word for word in command.argv]
                launchers.append(hosts.popen(node, argv, stdout=output, stderr=errors))
        launched = _Launched(hosts, folder, launchers)
        launched.to_mesh_s = (launched.wait_ready(ranks) - began_ns) / 1e9
        yield launched


def _ours(what: str, shape: str, count: int, *words: str) -> Command:
    options = ["--mesh", shape, "--names", "dp,tp", "--no-prefix"]
    if count > 1:
        options += ["--nnodes", str(count), "--rdzv-endpoint", "node0:29500", *words]
    return meshrun("meshrun", *options, PROGRAM, what, shape, "FOLDER")


def _theirs(what: str, shape: str, count: int, workers: int) -> Command:
    options = ["--nnodes", str(count), "--nproc-per-node", str(workers), "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", "node0:29500", "--rdzv-id", "bench"]
    return torchrun("torchrun", *options, PROGRAM, what, shape, "FOLDER")


def _theirs_static(what: str, shape: str, count: int, workers: int, node: int) -> Command:
    options = ["--nnodes", str(count), "--nproc-per-node", str(workers), "--node-rank", str(node)]
    options += ["--master-addr", "node0", "--master-port", "29500"]
    return torchrun("torchrun", *options, PROGRAM, what, shape, "FOLDER")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
