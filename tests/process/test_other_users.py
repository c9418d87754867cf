"""What others who may write to a folder could make of a launch: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit import poison

MESHRUN = Path(sys.executable).with_name("meshrun")
SAYS = "import os, sys\nprint(os.environ['RANK'], sys.path[0], flush=True)\n"
CALLS = """\
import os, sys
import meshrun

def first_path(): return sys.path[0]

how, program, shared = sys.argv[1:]
where = {"cwd": shared} if "elsewhere" in how else {}
if "script" in how:
    meshrun.launch(program, nproc_per_node=2, prefix=False, **where)
else:
    for rank, found in enumerate(meshrun.launch(first_path, nproc_per_node=2, **where)):
        print(rank, found)
"""
WAYS_IN = (
    *("fork", "exec", "command", "PYTHON_EXEC", "here", "ssh"),
    pytest.param("plug-in", marks=pytest.mark.torch),
    pytest.param("safe path", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="-P")),
    *("launch script", "launch script elsewhere", "launch function", "launch function elsewhere"),
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where anybody may put files, and somebody has put modules that note who runs."""
    (folder := tmp_path / "shared").mkdir(mode=0o777)
    folder.chmod(0o1777)
    poison(folder)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with programs of one's own."""
    (folder := tmp_path / "home").mkdir()
    (folder / "says.py").write_text(SAYS)
    (folder / "calls.py").write_text(CALLS)
    ssh = f'#!/bin/sh\ncd {tmp_path}/shared\nfor last; do :; done\nexec sh -c "$last"\n'
    (folder / "ssh").write_text(ssh)
    (folder / "ssh").chmod(0o755)
    return folder


def words_of(way: str, home: Path, shared: Path) -> Sequence[str | Path]:
    """Return the command of one way to start ranks, each of which says its ``sys.path[0]``."""
    program = home / "says.py"
    if way.startswith("launch"):
        return [sys.executable, home / "calls.py", way, program, shared]
    two = [MESHRUN, "--nproc-per-node", "2", "--no-prefix"]
    if way == "safe path":
        return [*two, "--preload", "numpy", "-m", "says"]
    options: dict[str, list[str | Path]] = {
        "exec": ["--start-method", "exec"],
        "command": ["--no-python", sys.executable],
        "plug-in": ["--logs-specs", "default"],
        "here": ["--hosts", "localhost"],
        "ssh": ["--hosts", "elsewhere", "--ssh", str(home / "ssh")],
    }
    return [*two, *options.get(way, []), program]


@pytest.mark.parametrize("way", WAYS_IN)
def test_no_file_of_the_working_folder_is_imported(
    way: str, home: Path, shared: Path, fake_torch: object
) -> None:
    """Whatever starts the processes of a launch, and a program sees what Python would show it."""
    env = dict(os.environ)
    if way == "PYTHON_EXEC":
        env["PYTHON_EXEC"] = os.path.join(os.path.dirname(sys.executable), ".", "python")
    if way == "plug-in":
        del env["PYTHONPATH"]  # it needs the real torch
    if way == "safe path":
        env |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{home}:{env['PYTHONPATH']}"}
    ours = subprocess.run(
        words_of(way, home, shared),
        cwd=home if "elsewhere" in way else shared,
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert sorted(ours.stdout.splitlines()) == [f"{rank} {home}" for rank in (0, 1)], ours.stderr
    assert not (shared / "imported").exists(), (shared / "imported").read_text()


@pytest.mark.parametrize("what", ["step", "job"])
def test_no_file_of_the_working_folder_is_imported_under_slurm(
    what: str, home: Path, shared: Path, fake_torch: object
) -> None:
    """The launchers that srun starts, from a shell of a job or from a script that is handed in."""
    (home / "srun").write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {home}/words\n')
    (home / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{home}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--device", "cpu", str(home / "says.py")]

    def run(*command: str | Path, **extra: str) -> str:
        done = subprocess.run(
            command, cwd=shared, env={**env, **extra}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    if what == "step":
        run(MESHRUN, *words, SLURM_JOB_ID="7")
    else:
        run("bash", "-c", run(MESHRUN, "--submit", "slurm", "--dry-run", *words))
    started = (home / "words").read_text().split("\0")
    launcher = started[started.index(sys.executable) : started.index("--nnodes")]

    assert run(*launcher, "--version").startswith("meshrun ")
    assert not (shared / "imported").exists(), (shared / "imported").read_text()
