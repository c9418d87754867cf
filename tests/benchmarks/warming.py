"""Runs from a warm server, compared with a plain import and torchrun, and the server's cost."""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from meshrun.warm.server_folder import ServerFolder
from tests.benchmarks.commands import (
    RANK_PROGRAM,
    Command,
    import_torch,
    meshrun,
    meshrun_ranks,
    python,
    torchrun_ranks,
)
from tests.benchmarks.processes import NotMeasured, cpu_seconds, gate, idle_ranks, pss_bytes
from tests.benchmarks.table import Samples, render_samples, render_table

_IDLE_S = 20.0
_IMPORTS_S = 120.0
_MIB = 1024 * 1024
LIBRARIES = (
    "import transformers",  # imports little else until a model is requested
    "from transformers import AutoModelForCausalLM, Trainer",
    "import lightning",
)
_HOLDS_TORCH = "import os, sys, time, torch; print('ready', flush=True); open(sys.argv[1]).read()"


def warm(runs: int | None) -> str:
    """Measure a run of 8 ranks from a warm server, with torch alone and with each library."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [_compare(folder, "torch", RANK_PROGRAM, import_torch(), runs or 7)]
        for number, statement in enumerate(filter(_can_be_run, LIBRARIES)):
            program = Path(folder, f"with_library_{number}.py")  # imports are recorded by file name
            text = Path(RANK_PROGRAM).read_text()
            program.write_text(text.replace("import torch\n", f"import torch\n{statement}\n", 1))
            code = f"import torch; {statement}"
            plain = python(f"`python -c '{code}'`", "-c", code)
            parts.append(_compare(folder, f"torch; {statement}", str(program), plain, runs or 3))
        return "\n".join((*parts, _idle_server(folder)))


def _can_be_run(statement: str) -> bool:
    """Whether the library of an import statement is installed."""
    return importlib.util.find_spec(statement.split()[1]) is not None


def _compare(folder: str, what: str, program: str, plain: Command, runs: int) -> str:
    fresh = _with(meshrun_ranks(8, "reduce"), program)
    commands = [
        plain,
        replace(_warm(fresh, folder), name="meshrun --warm, a later run"),
        fresh,
        _with(torchrun_ranks(8, "reduce"), program),
    ]
    _leave_server(commands[1], folder)
    samples: Samples = {command.name: [] for command in commands}
    for _ in range(runs):
        for command in commands:
            samples[command.name].append(_seconds(command))
    _seconds(_warm(meshrun("stop", "--warm-stop"), folder))
    return render_samples(f"8 ranks of a program that imports {what}", "s", samples)


def _idle_server(folder: str) -> str:
    """Compare an idle server with an interpreter that has imported torch; both run together."""
    launch = _warm(meshrun_ranks(8, "reduce"), folder)
    server = _leave_server(launch, folder)
    with gate() as held:
        holder = python("import torch", "-c", _HOLDS_TORCH, held.path)
        with idle_ranks(holder, 1, held) as plain:
            sizes = [pss_bytes(pid) / _MIB for pid in (plain.pid, server)]
            before = cpu_seconds(server)
            time.sleep(_IDLE_S)
            used_ms = (cpu_seconds(server) - before) * 1000
    _seconds(_warm(meshrun("stop", "--warm-stop"), folder))
    header = ("", "PSS, MiB", f"CPU in {_IDLE_S:g} s, ms")
    rows = [
        ("an interpreter that has imported torch", f"{sizes[0]:.0f}", "-"),
        ("an idle warm server", f"{sizes[1]:.0f}", f"{used_ms:.0f}"),
    ]
    return render_table("An idle warm server", header, rows)


def _with(command: Command, program: str) -> Command:
    argv = tuple(program if word == RANK_PROGRAM else word for word in command.argv)
    return replace(command, argv=argv)


def _warm(command: Command, folder: str) -> Command:
    extra = {"MESHRUN_WARM": "1", "XDG_RUNTIME_DIR": folder}
    return replace(command, extra_environment=extra)


def _leave_server(command: Command, folder: str) -> int:
    """Run once, wait until the server it leaves is usable, and return the server's process id."""
    _seconds(command)
    until = time.monotonic() + _IMPORTS_S
    while time.monotonic() < until:
        servers = ServerFolder(f"{folder}/meshrun")
        found = servers.servers()
        servers.close()
        if found:
            return found[0].server.pid
        time.sleep(0.05)
    raise NotMeasured(f"{command.name} left no server")


def _seconds(command: Command) -> float | None:
    """Return how long a command takes, ignoring what it leaves behind; ``None`` if it fails."""
    began = time.perf_counter()
    ended = subprocess.run(
        command.argv,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return time.perf_counter() - began if ended.returncode == 0 else None
