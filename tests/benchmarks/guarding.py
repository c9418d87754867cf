"""Measurements of what must be quick when something is wrong: cleanup, reports, stacks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.commands import SHAPES, Command, meshrun, torchrun
from tests.benchmarks.processes import (
    Gate,
    NotMeasured,
    end_everything,
    gate,
    idle_ranks,
    tree,
)
from tests.benchmarks.table import Samples, render_samples, render_table

_PROGRAM = str(Path(__file__).with_name("guard_program.py"))
_RANKS = 8
_MANY = 64
_END_TAKES_S = 10.0
_SETTLE_S = 2.0
"""How long ranks may take to block after they have reported that they are about to."""
_GRACE_S = 1.0


def killed(runs: int | None) -> str:
    """Kill launchers of 8 ranks with 2 loader workers each; measure until no process is alive."""
    ways = {
        "meshrun, launcher killed": (runs or 10, _ours("loader"), False),
        "meshrun, launcher and zygote killed": (runs or 10, _ours("loader"), True),
        "torchrun, launcher killed": (min(runs or 3, 3), _theirs("loader"), False),
    }
    rows = []
    for name, (count, words, both) in ways.items():
        launch = (meshrun if name.startswith("meshrun") else torchrun)(name, *words)
        took = [_time_until_all_ended(launch, both=both) for _ in range(count)]
        ended = sorted(seconds for seconds in took if seconds is not None)
        figures = [f"{ended[at]:.3f}" for at in (len(ended) // 2, 0, -1)] if ended else ["-"] * 3
        rows.append((name, f"{sum(each < 1 for each in ended)} of {count}", *figures))
    header = ("what is killed", "all ended within 1 s", "median, s", "min", "max")
    return render_table("SIGKILL, 8 ranks with 2 loader workers each", header, rows)


def report(runs: int | None) -> str:
    """Measure from a rank's death to the last line of the report, without the grace period."""
    parts = []
    for what, title in (("dies", "ranks end when told to"), ("deaf", "ranks ignore SIGTERM")):
        samples: Samples = {"meshrun": [], "torchrun": []}
        for _ in range(runs or 5):
            samples["meshrun"].append(_time_to_report(meshrun("meshrun", *_ours(what)), "error: "))
            theirs = torchrun("torchrun", *_theirs(what))
            samples["torchrun"].append(_time_to_report(theirs, "Root Cause"))
        grace = f", after the {_GRACE_S:g} s of grace" if what == "deaf" else ""
        heading = f"From a rank's death to the report: {title}{grace}"
        if what == "deaf":
            samples = {
                name: [None if each is None else each - _GRACE_S for each in values]
                for name, values in samples.items()
            }
        parts.append(render_samples(heading, "s", samples, digits=3))
    return "\n".join(parts)


def stacks(runs: int | None) -> str:
    """Measure from SIGQUIT to the merged stacks of 64 ranks, 63 of them in gloo's all_reduce."""
    samples: Samples = {"meshrun": []}
    shape = SHAPES[_MANY]
    with gate() as held:
        words = ("--mesh", shape, "--names", "dp,tp", _PROGRAM, "stuck", shape, held.path)
        with _stuck_ranks(meshrun("meshrun", *words), held) as process:
            for _ in range(runs or 7):
                samples["meshrun"].append(_time_to_stacks(process))
    return render_samples("From SIGQUIT to the merged stacks of 64 ranks", "s", samples)


def _ours(what: str) -> tuple[str, ...]:
    options = ("--mesh", SHAPES[_RANKS], "--names", "dp,tp", "--shutdown-timeout", f"{_GRACE_S}")
    return (*options, _PROGRAM, what, SHAPES[_RANKS])


def _theirs(what: str) -> tuple[str, ...]:
    return ("--standalone", "--nproc-per-node", str(_RANKS), _PROGRAM, what, SHAPES[_RANKS])


def _time_until_all_ended(command: Command, *, both: bool) -> float | None:
    """Return the seconds from the kill to the last descendant's end; ``None`` if some survive."""
    held = Gate(Path(tempfile.mkdtemp()) / "gate")
    with_gate = Command(command.name, (*command.argv, held.path))
    try:
        with idle_ranks(with_gate, _RANKS, held) as launcher:
            pids = tree(launcher)
            if len(pids) < 1 + _RANKS * 3:
                raise NotMeasured(f"{command.name}: {len(pids)} processes")
            victims = [*(child.pid for child in launcher.children() if both), launcher.pid]
            ends = {os.pidfd_open(pid) for pid in pids}
            began = time.monotonic()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            took = _wait_for(ends, began)
    except NotMeasured as error:
        if "after its ranks were idle" not in str(error):
            raise
    finally:
        held.open()
        end_everything()
    return took


def _wait_for(ends: set[int], began: float) -> float | None:
    """Wait until all processes have ended; return how long that took, ``None`` if some survive."""
    poll = select.poll()
    for fd in ends:
        poll.register(fd, select.POLLIN)
    left = set(ends)
    while left and time.monotonic() < began + _END_TAKES_S:
        for fd, _ in poll.poll(100):
            poll.unregister(fd)
            left.discard(fd)
    took = time.monotonic() - began
    for fd in ends:
        os.close(fd)
    return None if left else took


def _time_to_report(command: Command, mark: str) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "died")
        with gate() as held:
            process = subprocess.Popen(
                (*command.argv, held.path, str(log)),
                env={
                    **command.environment,
                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(_GRACE_S)),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert process.stderr is not None
            reported_ns = None
            for line in process.stderr:
                if mark in line:
                    reported_ns = time.monotonic_ns()
            process.wait()
        end_everything()
        return None if reported_ns is None else (reported_ns - int(log.read_text())) / 1e9


@contextmanager
def _stuck_ranks(command: Command, held: Gate) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command.argv,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for ready in range(_MANY):
        if not process.stdout.readline():
            raise NotMeasured(f"{ready} of {_MANY} ranks ready")
    time.sleep(_SETTLE_S)
    try:
        yield process
    finally:
        held.open()
        process.communicate()
        end_everything()


def _time_to_stacks(process: subprocess.Popen[str]) -> float:
    """Ask for the stacks and read to the last line, where the last rank waits for the gate."""
    assert process.stderr is not None
    began = time.monotonic()
    process.send_signal(signal.SIGQUIT)
    text = ""
    while not text.endswith("in wait_for_gate\n") or "\n    " not in text.rpartition("dp7 tp7")[2]:
        line = process.stderr.readline()
        if not line:
            raise NotMeasured("the launch ended instead of printing stacks")
        text += line
    if "all_reduce at" not in text:
        raise NotMeasured(f"not every rank waits in all_reduce:\n{text}")
    return time.monotonic() - began
