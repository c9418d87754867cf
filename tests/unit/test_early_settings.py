# ruff: noqa: E501 - one row per line
"""The variables that a program sets before it imports torch, read from its source."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import pytest

from meshrun.mesh.late_settings import note
from meshrun.worker.early_settings import EarlySettings, is_read_at_import, read_early_settings

_ENV = {"HOME": "/home/me", "TORCH_TRACE": "/old", "SITE_THREADS": "6"}


def _read(source: str, folder: Path = Path("/nowhere")) -> EarlySettings:
    tree = ast.parse("import os\n" + source)
    return read_early_settings(
        tree, str(folder / "train.py"), _ENV, folder=str(folder), args=["--x"]
    )


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("os.environ['TORCH_LOGS'] = 'dynamo'\nimport torch", {"TORCH_LOGS": "dynamo"}),
        ("import torch\nos.environ['TORCH_LOGS'] = 'dynamo'", {}),
        ("from torch import nn\nos.environ['TORCH_LOGS'] = 'dynamo'", {}),
        ("import numpy\nos.environ['TORCH_LOGS'] = 'dynamo'", {"TORCH_LOGS": "dynamo"}),
        ("os.environ.update({'A': '1'}, B='2')", {"A": "1", "B": "2"}),
        ("os.environ |= {'A': '1'}", {"A": "1"}),
        ("os.environ.setdefault('HOME', '/tmp')", {}),
        ("os.environ.setdefault('A', '1')", {"A": "1"}),
        ("os.environ.setdefault('A', '1'); os.environ.setdefault('A', '2')", {"A": "1"}),
        ("os.putenv('A', '1')", {"A": "1"}),
        ("known = input()\nknown.method()\nunheard.of()\nos.putenv('A', '1')", {"A": "1"}),
        ("from os import environ as e\ne['A'] = '1'", {"A": "1"}),
        ("import os as o\no.environ['A'] = '1'", {"A": "1"}),
        ("e = os.environ\ne['A'] = '1'\ne.setdefault('B', '2')", {"A": "1", "B": "2"}),
        ("del os.environ['TORCH_TRACE']", {"TORCH_TRACE": None}),
        ("os.environ.pop('TORCH_TRACE', None)", {"TORCH_TRACE": None}),
        ("for k, v in {'A': '1', 'B': '2'}.items():\n  os.environ[k] = v", {"A": "1", "B": "2"}),
        ("for k, v in [('A', '1')]:\n  os.environ[k] = v", {"A": "1"}),
        ("for k in ('A', 'B'):\n  os.environ.setdefault(k, '1')", {"A": "1", "B": "1"}),
        ("all = dict(A='1')\nall['B'] = '2'\nos.environ['C'] = '3'", {"C": "3"}),
        ("one = 1\nos.environ['A'] = str(one)", {"A": "1"}),
        ("os.environ['A'] = f'{os.sep}x'", {"A": "/x"}),
        ("os.environ['A'] = os.path.join(os.environ['HOME'], 'x')", {"A": "/home/me/x"}),
        ("os.environ['A'] = os.environ.get('SITE_THREADS', '4')", {"A": "6"}),
        ("os.environ['A'] = os.getenv('MISSING') or '4'", {"A": "4"}),
        ("if 'A' not in os.environ:\n  os.environ['A'] = '1'", {"A": "1"}),
        ("if __name__ == '__main__':\n  os.environ['A'] = '1'", {"A": "1"}),
        ("def f(v='2'):\n  os.environ['A'] = v\nf()", {"A": "2"}),
        ("def f(v):\n  os.environ['A'] = v\nf(v='3')", {"A": "3"}),
        ("def f():\n  os.environ['A'] = '1'\n  import torch\n  os.environ['B'] = ''\nf()", {"A": "1"}),
        ("def f():\n  os.environ['A'] = '1'", {}),
        ("def f():\n  return\n  os.environ['A'] = '1'\nf()", {}),
        ("import typing as t\nif t.TYPE_CHECKING:\n  import torch\nos.environ['A'] = '1'", {"A": "1"}),
        ("try:\n  os.environ['A'] = '1'\nexcept OSError: pass", {"A": "1"}),
        ("with open('x') as f:\n  os.environ['A'] = '1'", {"A": "1"}),
        ("os.environ['A'] = 'x' if True else 'y'", {"A": "x"}),
        ("def f():\n  f(); f(); f(); f(); f(); f(); f(); f()\nf()\nos.environ['A'] = '1'", {"A": "1"}),
        ("import sys\nif '--x' in sys.argv:\n  os.environ['A'] = sys.argv[1]", {"A": "--x"}),
        ("while os.environ.setdefault('A', '1') == '2': pass", {"A": "1"}),
        ("raise SystemExit(os.environ.setdefault('A', '1'))", {"A": "1"}),
        ("os.environ['OMP_NUM_THREADS'] = '3'", {}),  # takes effect at run time
    ],
)  # fmt: skip
def test_what_the_source_shows(source: str, values: dict[str, str | None]) -> None:
    """Plain values, wherever they are set before the first import of torch."""
    found = _read(source)

    assert found.values == values
    assert found.unclear == {}


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['A'] = input()",
        "import sys\nif sys.stdin.isatty():\n  os.environ['A'] = '1'",
        "os.environ['A'] = os.environ['LOCAL_RANK']",
        "os.environ.update({'A': str(object())})",
        "os.environ.update(A=input())",
        "all = {}\nall.update(x)\nos.environ['A'] = all['x']",
        "def f(v):\n  os.environ['A'] = v\nf(input())",
        "def f():\n  if input():\n    return\n  os.environ['A'] = '1'\nf()",
        "while input():\n  os.environ['A'] = '1'",
        "try: import x\nexcept ImportError:\n  os.environ['A'] = '1'",
        "if input():\n  os.environ['B'] = '1'\nos.environ['A'] = os.environ.get('B', '2')",
    ],
)
def test_what_only_a_run_can_show(source: str) -> None:
    """The variable is named as unclear, and has no value."""
    found = _read(source + "\nimport torch\nos.environ['Z'] = input()")

    assert "A" in found.unclear
    assert "Z" not in found.unclear
    assert found.values == {}


def test_modules_beside_the_program_are_followed(tmp_path: Path) -> None:
    """And their functions, where they are called; a module that imports torch ends the search."""
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "__init__.py").write_text("import os\nos.environ['A'] = '1'\n")
    (tmp_path / "settings" / "more.py").write_text(
        "import os\nfrom . import again\ndef put(v):\n  os.environ['B'] = v + NAME\nNAME = 'x'\n"
    )
    (tmp_path / "models.py").write_text("import os, torch\nos.environ['D'] = '4'\n")
    found = _read(
        "import settings.more\nfrom settings.more import put as p\np('2')\n"
        "import models\nos.environ['C'] = '3'\n",
        tmp_path,
    )

    assert found.values == {"A": "1", "B": "2x"}


def test_the_source_is_followed_only_so_far() -> None:
    """Calls and loops multiply: these would be a billion statements."""
    calls = "".join(f"def f{n}():\n  f{n + 1}(); f{n + 1}()\n" for n in range(30))
    assert _read(f"os.environ['A'] = '1'\n{calls}f0()").values == {"A": "1"}
    loops = "".join(f"{' ' * n}for _ in range_of_ten:\n" for n in range(9))
    source = f"os.environ['A'] = '1'\nrange_of_ten = '0123456789'\n{loops}{' ' * 9}x = 1"
    assert _read(source).values == {"A": "1"}


def test_a_variable_that_is_read_later_needs_nothing() -> None:
    """It takes effect in the rank, which sets it itself."""
    assert is_read_at_import("TORCH_LOGS")
    assert is_read_at_import("TORCHINDUCTOR_MAX_AUTOTUNE")
    assert is_read_at_import("PYTORCH_CUDA_ALLOC_CONF")  # its `backend` is chosen at import
    assert not is_read_at_import("CUDA_VISIBLE_DEVICES")
    assert not is_read_at_import("TORCH_HOME")


def test_a_note_needs_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has closed it is not ended by a note."""
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    closed.close()
    note("NCCL_DEBUG was changed")
