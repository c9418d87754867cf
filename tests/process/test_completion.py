"""Completion in real shells, driven by keystrokes."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrun.cli.completion import install_completion, render_completion
from meshrun.cli.options import Options
from meshrun.errors import HostError, UsageError
from tests.terminal import Terminal

CLEAR = "\25"
"""Ctrl-U, which clears the line in every shell."""
TYPED = {
    "meshrun --mesh 2x4 --names alpha,beta --show be\t": "--show beta=",
    "meshrun --mesh alpha=2,beta=4 --intra-node alpha,be\t": "--intra-node alpha,beta",
    "meshrun --mesh=alpha=2,beta=4 --timeout=be\t": "--timeout=beta=",
    "meshrun --start-method exec --redirects 3 --report no\t": "--report notes.txt",
    "meshrun --log-dir lo\t": "--log-dir logs/",
    "meshrun --max-restarts no\tX": "--max-restarts noX",
    "meshrun --status-i\t": "meshrun --status-interval",
    "meshrun --collapse tr\t": "--collapse train.py",
    "meshrun train.py --status-i\tX": "meshrun train.py --status-iX",
    "meshrun --help rend\t": "--help rendezvous",
    "meshrun --format s\t": "--format svg",
}
"""Keys typed, and text that the line must then contain."""


@contextmanager
def open_shell(name: str, home: Path) -> Iterator[Terminal]:
    """Yield an interactive shell with its own home folder."""
    env = {
        "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": "", "SHELL": "/bin/sh",
    }  # fmt: skip
    terminal = Terminal([name], env, 250, 40)
    try:
        terminal.type("echo re''ady\n")
        terminal.wait_for("ready")
        yield terminal
    finally:
        terminal.end()


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    """Return a shell that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return str(request.param)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a shell's home, and enter the empty folder ``work`` beside it."""
    (home := tmp_path / "home").mkdir()
    # Without this folder, fish first parses all man pages.
    (home / ".local" / "share" / "fish" / "generated_completions").mkdir(parents=True)
    (work := tmp_path / "work").mkdir()
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.chdir(work)
    return home


def test_what_is_typed_is_completed(shell: str, home: Path) -> None:
    """After --install-completion, which is idempotent."""
    (startup := home / f".{shell}rc").write_text("# mine")
    Path("logs").mkdir()
    for name in ("notes.txt", "train.py"):
        Path(name).touch()
    with open_shell(shell, home) as terminal:
        for count in (1, 2):
            terminal.type("meshrun --install-completion\n")
            terminal.wait_for("run this again after an upgrade", count)
        assert ("added a line" in "\n".join(terminal.all_lines)) == (shell != "fish")
    with open_shell(shell, home) as terminal:
        for keys, shown in TYPED.items():
            terminal.type(CLEAR + keys)
            terminal.wait_for(shown)

    lines = startup.read_text().splitlines()
    assert lines[0] == "# mine"
    assert len(lines) == (1 if shell == "fish" else 2)


def test_a_command_in_a_mesh_is_not_run(
    shell: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that is typed, perhaps pasted, nor one in the variable."""
    (home / "completion").write_text(render_completion(shell, Options))
    monkeypatch.setenv("MESHRUN_MESH", "a$(touch${IFS}c)=2,b`touch${IFS}d`=2,dp=2")
    with open_shell(shell, home) as terminal:
        terminal.type(f". {home}/completion; echo load''ed\n")
        terminal.wait_for("loaded")
        terminal.type("meshrun --show d\t")
        terminal.wait_for("--show dp=")
        mesh = "'a$(touch${IFS}e)=2,b`touch${IFS}f`=2,tp=2'"
        terminal.type(f"{CLEAR}meshrun --mesh {mesh} --show t\t")
        terminal.wait_for("--show tp=")

    assert os.listdir() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_a_script_knows_every_option(shell: str) -> None:
    """It completes without starting Python."""
    script = render_completion(shell, Options)

    assert [row.flag for row in Options.rows() if row.flag[2:] not in script] == []
    assert "python -m meshrun" not in script
    assert "$(meshrun" not in script


def test_every_suggested_value_is_accepted() -> None:
    for row in Options.rows():
        for word in row.suggested:
            row.parse((word,) if row.repeats else word, row.flag)


def test_an_unknown_shell_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    monkeypatch.setattr("psutil.Process.parents", lambda _process: [])
    env = {"SHELL": "/bin/nosh", "HOME": str(tmp_path)}

    with pytest.raises(UsageError, match=r"bash, zsh, fish, found SHELL=nosh"):
        install_completion(Options, env)
    assert not any(tmp_path.iterdir())


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".local").touch()

    with pytest.raises(HostError, match=r"cannot write `.*/.local/share/meshrun`: Not a directory"):
        install_completion(Options, {"HOME": str(tmp_path)}, "zsh")
