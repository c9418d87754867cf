"""Typical programs, run repeatedly: races at the end show up once in many runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun

EVERYDAY = PROGRAMS / "everyday.py"
_HELPERS = ("square", "train", "spin", "churn")
_NAMES = [
    each.name
    for each in ast.parse(EVERYDAY.read_text()).body
    if isinstance(each, ast.FunctionDef) and each.name not in _HELPERS
]
_LAUNCHES = (
    ("--nproc-per-node", "2"),
    ("--mesh", "dp=3", "--device", "cpu"),
    ("--nproc-per-node", "2", "--start-method", "exec"),
)
_OFTEN = 10


def check(name: str, launch: tuple[str, ...], folder: Path) -> None:
    """Run a program once; its ranks succeed and leave nothing in shared memory."""
    folder.mkdir()
    ours = run_meshrun(*launch, EVERYDAY, name, env={"FOLDER": str(folder)})
    ranks = int(launch[1].removeprefix("dp="))

    assert ours.returncode == 0, ours.stderr
    successes = 1 if name == "saved_by_the_first" else ranks
    assert ours.stdout.count("well\n") == successes, ours.stdout
    for text in ("Aborted", "terminate called", "Fatal Python error"):
        assert text not in ours.stderr
    assert ours.stderr.count("ValueError: in a child of rank") == (name == "forks") * ranks


@pytest.mark.torch
@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(_LAUNCHES[1], id="mesh"),
        pytest.param(_LAUNCHES[2], id="exec", marks=pytest.mark.nightly),
    ],
)
def test_a_forked_child_may_end_in_any_way(launch: tuple[str, ...], tmp_path: Path) -> None:
    """With its own status, files and traceback; groups whose threads it lacks do not block it."""
    check("forks", launch, tmp_path / "run")


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", _NAMES)
def test_an_everyday_program_ends_well_every_time(name: str, tmp_path: Path) -> None:
    """Ten times in a row, with and without a mesh, by fork and by exec."""
    for number in range(_OFTEN):
        check(name, _LAUNCHES[number % len(_LAUNCHES)], tmp_path / str(number))


@pytest.mark.torch
def test_a_library_may_replace_how_threads_start(tmp_path: Path) -> None:
    """gevent does, and meshrun's thread would be a greenlet that blocks the program's only one."""
    program = tmp_path / "patched.py"
    program.write_text(
        "import _thread\n"
        "started = []\n"
        "_thread.start_new_thread = lambda function, *_: started.append(function)\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(started)\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", program)
    assert (ours.returncode, ours.stdout) == (0, "[]\n" * 2), ours.stderr
