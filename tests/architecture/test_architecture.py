"""The structure: imports between modules, public names, and where files are."""

import builtins
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from inspect import isfunction
from pathlib import Path
from typing import get_type_hints

import pytest

import meshrun
from meshrun.protocol.result import RankFailure
from tests.kit import ROOT

PUBLIC = [
    "GroupLost", "LaunchResult", "Layout", "MeshError", "MeshrunError", "RankFailed",
    "WorkerGroup", "current_layout",
    "current_mesh", "data_shard", "exclude_node", "has_mesh", "heartbeat", "init_mesh", "launch",
    "progress", "use_mesh",
]  # fmt: skip
TOP_LEVEL = {"pyproject.toml", "meshrun", "tests", "examples", "docs", "README.md", "LICENSE"}
TOOLS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ["lint-imports", "--no-cache"],
        ["ruff", "check", "meshrun", "tests", "examples"],
        ["ruff", "check", "--preview", "--select", "PLW1514", "meshrun"],  # text without encoding
        ["ruff", "format", "--check", "meshrun", "tests", "examples"],
        ["mypy"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_tool_finds_nothing(command: list[str]) -> None:
    """Import contracts, lint, formatting and types are clean."""
    result = subprocess.run(
        [TOOLS / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_few_modules_import_torch_or_rich() -> None:
    """The launcher starts without them."""
    with_torch = re.compile("(worker|zygote|mesh)/.*|testing.py|rendezvous/torch_.*")

    assert [file for file in importers("torch") if not with_torch.fullmatch(file)] == []
    assert [file for file in importers("rich") if not file.startswith("report/")] == []


def test_time_comes_from_the_reactor() -> None:
    """Launchers and hosts take it from the reactor's clock, which tests replace."""
    own_clock = re.compile(
        "rendezvous/torch_.*"  # runs in a process of its own
        "|ssh/host_session.py"  # waits for processes
    )
    loop = (f"supervisor/{name}.py" for name in ("loop", "monitor", "node_link", "watchdog"))
    rooms = ("lifecycle/", "rendezvous/", "ssh/", *loop)
    read_it = [file for file in importers("time") if file.startswith(rooms)]

    assert [file for file in read_it if not own_clock.fullmatch(file)] == []


def importers(package: str) -> list[str]:
    """Return the files that import a package."""
    imports, folder = re.compile(rf"^ *(import|from) {package}\b", re.MULTILINE), ROOT / "meshrun"
    files = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.py")}
    found = [name for name, text in files.items() if imports.search(text)]
    assert found
    return found


def test_the_public_names_are_frozen() -> None:
    """A new public name is a deliberate act, and belongs in the reference."""
    reference = (ROOT / "docs" / "reference" / "python-api.md").read_text()

    assert sorted(meshrun.__all__) == PUBLIC
    assert all(getattr(meshrun, name) is not None for name in PUBLIC)
    assert [name for name in PUBLIC if name not in reference] == []
    kept = {field.name for held in (meshrun.LaunchResult, RankFailure) for field in fields(held)}
    assert [name for name in sorted(kept) if f"`{name}`" not in reference] == []


def test_rooms_take_no_public_names_from_the_package() -> None:
    """The contract of imports cannot see these."""
    texts = (path.read_text() for path in (ROOT / "meshrun").rglob("*.py"))
    taken = (
        name for text in texts for name in re.findall(r"(?m)^ *from meshrun import (.+)", text)
    )

    assert set(PUBLIC).isdisjoint(re.split(r"\W+", " ".join(taken)))


def test_the_hints_of_public_functions_can_be_read() -> None:
    """By ``typing.get_type_hints()``, although torch is not imported."""
    functions = [each for name in PUBLIC if isfunction(each := getattr(meshrun, name))]

    assert len(functions) == 10
    assert all("return" in get_type_hints(function) for function in functions)


def test_the_modules_of_the_root_are_few() -> None:
    """At most eight modules are in the root, and no two modules or public classes share a name.

    Except for the main module of three packages, which has the package's name.
    """
    files = list((ROOT / "meshrun").rglob("*.py"))
    texts = [file.read_text() for file in files]
    names = [file.parent.name if file.name == "__init__.py" else file.stem for file in files]
    classes = re.findall(r"^class ([A-Z]\w*)", "\n".join(texts), re.MULTILINE)

    assert len(list((ROOT / "meshrun").glob("*.py"))) <= 8
    twice = {name for name, times in Counter([*names, *classes]).items() if times > 1}
    assert twice == {"console", "layout", "plan"}


def test_docstrings_raise_classes_that_exist() -> None:
    """Each name under ``Raises:`` is a class of the package, a built-in or the module's import."""
    texts = {path: path.read_text() for path in (ROOT / "meshrun").rglob("*.py")}
    ours = {*re.findall(r"^class (\w+)", "\n".join(texts.values()), re.MULTILINE), *vars(builtins)}
    raised = [
        (path.name, name)
        for path, text in texts.items()
        for indent, rest in re.findall(r"(?m)^( *)Raises:\n((?:\1 .*\n)+)", text)
        for name in re.findall(rf"(?m)^{indent}    ([\w.]+): ", rest)
        if name not in ours and not re.search(rf"import .*\b{name.split('.')[0]}\b", text)
    ]

    assert raised == []


def test_the_top_level_is_closed() -> None:
    """Only expected files and folders are in the root of the repository."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("needs a git checkout, to list the tracked files")

    assert {
        name for path in tracked if not (name := path.split("/")[0]).startswith(".")
    } <= TOP_LEVEL
