"""Measurements of launches that print a lot."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.benchmarks.commands import Command, meshrun, torchrun
from tests.benchmarks.processes import NotMeasured, gate
from tests.benchmarks.table import Samples, render_samples, render_table

_PROGRAM = str(Path(__file__).with_name("print_program.py"))
_READ_BYTES = 1024 * 1024
_MIB = 1024 * 1024
_LINE = re.compile(rb"rank (\d{3}) step (\d{9}|        ~) \.{75}")


def output(runs: int | None) -> str:
    """Measure 8 ranks that print 200 MB to files and through the launcher's stdout."""
    return "\n".join(
        (
            _output(runs, 100, "8 ranks print 200 MB, -t 3, 100 lines at once"),
            _output(runs, 1, "8 ranks print 200 MB, -t 3, one print per line"),
        )
    )


def _output(runs: int | None, at_once: int, title: str) -> str:
    ranks, megabytes = 8, 25
    samples: Samples = {"meshrun": [], "torchrun": [], "cat": []}
    whole: dict[str, str] = {}
    for _ in range(runs or 3):
        with tempfile.TemporaryDirectory() as folder:
            for name, make in (("meshrun", meshrun), ("torchrun", torchrun)):
                words = ("--nproc-per-node", str(ranks), "-t", "3", "--log-dir", f"{folder}/{name}")
                taken = Path(folder, f"{name}.out")
                with gate() as held:
                    program = (_PROGRAM, str(megabytes), held.path, str(at_once))
                    seconds = _read_all(make(name, *words, *program), ranks, held, taken)
                samples[name].append(ranks * megabytes / seconds)
                whole[name] = _check(taken, ranks, megabytes * 10_000)
            samples["cat"].append(_cat(Path(folder, "meshrun.out")))
    table = render_samples(title, "MB/s", samples, digits=0)
    rows = list(whole.items())
    return f"{table}\n{render_table('Lines that arrived', ('command', 'lines'), rows)}"


def slow(runs: int | None) -> str:
    """Measure the launcher's memory while one rank prints 1 GB and the reader is slow."""
    rows = []
    for name, options in (("printed", ()), ("printed and in files", ("-t", "3"))):
        for _ in range(runs or 1):
            with gate() as held, tempfile.TemporaryDirectory() as folder:
                words = (*options, "--log-dir", folder)
                command = meshrun("meshrun", *words, _PROGRAM, "1000", held.path, "100")
                peak, lines = _read_slowly(command, held)
            rows.append((name, f"{peak / _MIB:.0f}", f"{lines:,}"))
    header = ("1 GB, read slowly", "launcher's peak memory, MiB (RSS)", "lines read")
    return render_table("A slow reader", header, rows)


@contextmanager
def _started(command: Command) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        command.argv,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        yield process
    if process.returncode:
        raise NotMeasured(f"{command.name} exited with {process.returncode}")


def _wait_until_ready(process: subprocess.Popen[bytes], ranks: int) -> bytes:
    assert process.stdout is not None
    seen = b""
    while seen.count(b"ready") < ranks:
        data = os.read(process.stdout.fileno(), _READ_BYTES)
        if not data:
            raise NotMeasured("ended before its ranks were ready")
        seen += data
    return seen


def _read_all(command: Command, ranks: int, held: object, taken: Path) -> float:
    """Return the seconds from the start of printing to the last byte; keep the output in a file."""
    with _started(command) as process, open(taken, "wb") as file:
        assert process.stdout is not None
        file.write(_wait_until_ready(process, ranks))
        held.open()  # type: ignore[attr-defined]
        began = ended = time.perf_counter()
        while data := os.read(process.stdout.fileno(), _READ_BYTES):
            ended = time.perf_counter()
            file.write(data)
    return ended - began


def _check(taken: Path, ranks: int, lines: int) -> str:
    """Return how many lines arrived whole and separate, and in order if they are numbered."""
    last = dict.fromkeys(range(ranks), -1)
    whole = glued = 0
    with open(taken, "rb") as file:
        for line in file:
            found = _LINE.findall(line)
            if len(found) != 1 or len(line) > 140:
                glued += b" step " in line
                continue
            rank, number = int(found[0][0]), found[0][1]
            if number[-1:] == b"~":
                whole += 1
            elif int(number) > last[rank]:
                last[rank] = int(number)
                whole += 1
    return f"{whole:,} of {ranks * lines:,} whole and in order, {glued:,} broken or glued"


def _cat(path: Path) -> float:
    """Return how many MB per second ``cat`` sends through a pipe to the same kind of reader."""
    size = path.stat().st_size
    began = time.perf_counter()
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with open(os.devnull, "wb") as sink:
            while data := os.read(process.stdout.fileno(), _READ_BYTES):
                sink.write(data)
    return size / 1e6 / (time.perf_counter() - began)


def _read_slowly(command: Command, held: object) -> tuple[int, int]:
    """Return the launcher's peak memory and the line count, read at about 100 MB per second."""
    peak = lines = 0
    with _started(command) as process:
        assert process.stdout is not None
        _wait_until_ready(process, 1)
        launcher = psutil.Process(process.pid)
        held.open()  # type: ignore[attr-defined]
        threading.Event().wait(3.0)  # the rank prints while nothing is read
        while data := os.read(process.stdout.fileno(), 64 * 1024):
            lines += data.count(b"\n")
            if lines % 50 == 0:
                try:
                    peak = max(peak, launcher.memory_info().rss)
                except psutil.Error:
                    break
            time.sleep(0.0005)
        while data := os.read(process.stdout.fileno(), _READ_BYTES):
            lines += data.count(b"\n")
    return peak, lines
