"""Variables that a program sets before it imports torch work, although torch is preloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun

pytestmark = pytest.mark.torch
_PROGRAM = PROGRAMS / "early_settings.py"
_ENV = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def _by_python(*args: str) -> list[str]:
    """Return what each of two separate interpreters prints."""
    words = [sys.executable, str(_PROGRAM), *args]
    ours = subprocess.run(words, check=True, capture_output=True, text=True, env=_ENV)
    return ours.stdout.splitlines() * 2


@pytest.mark.parametrize(
    "options", [pytest.param((), marks=pytest.mark.nightly), ("--mesh", "dp=2")]
)
def test_constant_values_have_their_effect(options: tuple[str, ...]) -> None:
    """As if each rank had imported torch itself."""
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", *options, _PROGRAM, "1")

    assert ours.stdout.splitlines() == _by_python("1")
    assert "meshrun:" not in ours.stderr


@pytest.mark.nightly
def test_a_value_known_only_at_run_time_requires_an_interpreter_per_rank() -> None:
    """The mesh is then built on the first current_mesh(); messages name the line for both."""
    words = ("1", "unclear", "mesh")
    ours = run_meshrun("--mesh", "dp=2", "--no-prefix", _PROGRAM, *words)

    assert sorted(ours.stdout.splitlines()) == sorted([*_by_python("1", "unclear"), "(2,)", "(2,)"])
    assert "interpreter per rank: early_settings.py:12 sets TORCHDYNAMO_VERBOSE" in ours.stderr
    assert "at the first current_mesh(), because early_settings.py:12 sets" in ours.stderr


def test_a_value_that_comes_too_late_is_warned_of() -> None:
    """Once, and not if it has an effect, or would have none under Python either."""
    ours = run_meshrun("--nproc-per-node", "2", _PROGRAM, "0", "hidden")
    warnings = [line for line in ours.stderr.splitlines() if "was set after torch" in line]

    assert [line.split()[3] for line in warnings] == ["TORCHDYNAMO_VERBOSE"]


@pytest.mark.nightly
@pytest.mark.parametrize("counts", [(), ("3", "1")], ids=["not set", "set twice"])
def test_a_single_worker_has_as_many_threads_as_under_python(
    counts: tuple[str, ...], tmp_path: Path
) -> None:
    """meshrun does not set OMP_NUM_THREADS for it, although the zygote imported with one thread."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "for count in sys.argv[1:]:\n"
        "    os.environ['OMP_NUM_THREADS'] = count\n"
        "import torch\n"
        "print(torch.get_num_threads(), os.environ.get('OMP_NUM_THREADS'))\n"
    )
    words = [sys.executable, str(program), *counts]
    theirs = subprocess.run(words, check=True, capture_output=True, text=True, env=_ENV)
    ours = run_meshrun("--no-prefix", program, *counts)

    assert (ours.stdout, ours.returncode) == (theirs.stdout, 0)
