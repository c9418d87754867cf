"""What other users could do to a launch through a shared folder or an inherited variable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, poison, run_meshrun, start_meshrun

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
EXCHANGES = """\
import os, sys
import meshrun

def exchange(place, precious):
    for name in os.listdir(place):
        folder = os.path.join(place, name)
        if os.path.exists(os.path.join(folder, "call")):
            os.rename(folder, folder + ".moved")
            os.mkdir(folder)
            for file in ("0.pkl.part", "report.json", "error.json"):
                os.symlink(precious, os.path.join(folder, file))

meshrun.launch(exchange, args=sys.argv[1:], nproc_per_node=1)
"""
WAYS_IN = (
    *("fork", "exec", "command", "PYTHON_EXEC", "here", "ssh"),
    pytest.param("plug-in", marks=[pytest.mark.torch, pytest.mark.nightly]),
    pytest.param("safe path", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="-P")),
    *("launch script", "launch script elsewhere", "launch function", "launch function elsewhere"),
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A world-writable folder where somebody has put modules that record who imports them."""
    (folder := tmp_path / "shared").mkdir(mode=0o777)
    folder.chmod(0o1777)
    poison(folder)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the user's own programs."""
    (folder := tmp_path / "home").mkdir()
    (folder / "says.py").write_text(SAYS)
    (folder / "calls.py").write_text(CALLS)
    ssh = f'#!/bin/sh\ncd {tmp_path}/shared\nfor last; do :; done\nexec sh -c "$last"\n'
    (folder / "ssh").write_text(ssh)
    (folder / "ssh").chmod(0o755)
    return folder


def words_of(way: str, home: Path, shared: Path) -> Sequence[str | Path]:
    """Return the command of one way to start ranks, each of which prints its ``sys.path[0]``."""
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
    """However the ranks are started; ``sys.path[0]`` is the program's folder, as under Python."""
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
    """By launchers that srun starts, from a shell of a job or from a submitted script."""
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
        # Without the launchers' stderr, srun's exit code is taken as the result.
        run(MESHRUN, *words, SLURM_JOB_ID="7", SLURM_STDERRMODE="none")
    else:
        run("bash", "-c", run(MESHRUN, "--submit", "slurm", "--dry-run", *words))
    started = (home / "words").read_text().split("\0")
    ours = os.path.realpath(sys.executable)  # the command `meshrun` may call it `python3`
    first = [os.path.realpath(word) for word in started].index(ours)
    launcher = started[first : started.index("--nnodes")]

    assert run(*launcher, "--version").startswith("meshrun ")
    assert not (shared / "imported").exists(), (shared / "imported").read_text()


def test_nothing_is_written_through_a_temporary_folder_that_was_replaced(
    home: Path, tmp_path: Path, fake_torch: object
) -> None:
    """Where others may rename it, they can put links to the user's files in its place."""
    (scratch := tmp_path / "scratch").mkdir()
    (precious := tmp_path / "precious").write_text("kept")
    (home / "exchanges.py").write_text(EXCHANGES)
    ours = subprocess.run(
        [sys.executable, home / "exchanges.py", scratch, precious],
        env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert list(scratch.glob("*.moved")), ours.stderr
    assert ours.returncode == 1
    assert precious.read_text() == "kept"


def test_logs_are_written_to_the_folder_that_was_created(
    tmp_path: Path, fake_torch: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it is renamed and a folder with links to the user's files takes its place."""
    (logs := tmp_path / "logs").mkdir()
    (moved := tmp_path / "moved").mkdir()
    (precious := tmp_path / "precious").write_text("kept")
    os.mkfifo(torch := tmp_path / "torch")
    monkeypatch.setenv("FAKE_TORCH_WAITS", str(torch))
    words = ("-r", "1", "-t", "2", "--duplicate-stdout-filters", "out", "--log-dir", logs)
    with start_meshrun(*words, PROGRAMS / "echo.py", folder=tmp_path) as running:
        with open(torch, "w"):  # once the zygote imports torch, the folder exists
            (run,) = logs.iterdir()
            run.rename(moved / run.name)
            (planted := run / "attempt_0" / "0").mkdir(parents=True)
            for name in ("0/stdout.log", "0/stderr.log", "0/error.json", "filtered_stdout.log"):
                (planted.parent / name).symlink_to(precious)
        assert running.wait() == 0, running.stderr

    assert precious.read_text() == "kept"
    assert (moved / run.name / "attempt_0" / "0" / "stdout.log").read_text() == "out 0\n"
    assert (moved / run.name / "attempt_0" / "0" / "stderr.log").read_text() == "err 0\n"
    assert running.stderr.endswith("err 0\n")  # the console reads it from the moved folder


@pytest.mark.parametrize("options", [[], ["--logs-specs", "default"]])
def test_a_log_folder_that_others_may_replace_is_refused(
    options: list[str], tmp_path: Path, fake_torch: Path
) -> None:
    """Before anything is started or created, unless --allow-shared-log-dir is given."""
    (shared := tmp_path / "open").mkdir()
    shared.chmod(0o777)
    words = ["--tee", "3", "--log-dir", shared / "logs"]
    ours = run_meshrun(*options, *words, PROGRAMS / "echo.py")

    assert ours.returncode == 2
    assert f"everyone can write to `{shared}`" in ours.stderr
    assert "--allow-shared-log-dir" in ours.stderr
    assert (list(shared.iterdir()), fake_torch.exists()) == ([], False)
    if not options:
        allowed = run_meshrun("--allow-shared-log-dir", *words, PROGRAMS / "echo.py")
        assert (allowed.returncode, len(list((shared / "logs").iterdir()))) == (0, 1)


def test_a_variable_deletes_no_folder(tmp_path: Path, fake_torch: object) -> None:
    """Nor does it tie a launch to another process."""
    (similar := tmp_path / "meshrun_notes").mkdir()
    (theirs := tmp_path / "theirs").mkdir()
    for folder in (similar, theirs):
        (folder / "precious").touch()
        env = {"MESHRUN_PARENT_PID": "1", "MESHRUN_PARENT_FOLDER": str(folder)}
        ours = run_meshrun("--version", env=env)

        assert (folder / "precious").exists()
        assert (folder == similar) or ours.returncode == 0, ours.stderr
