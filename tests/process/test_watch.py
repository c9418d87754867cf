"""``--watch``: every change of the program launches it again."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.kit import Running, start_meshrun, wait_until
from tests.terminal import open_terminal

pytest.importorskip("watchfiles")

PROGRAM = """\
import os, time
from package import part

print("part", part.value, "on", os.environ["RANK"], flush=True)
while part.value % 2:
    time.sleep(0.01)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_torch: Path) -> Path:
    """A folder with a program that ends if the value in one of its modules is even."""
    (folder := tmp_path / "project").mkdir()
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "part.py").write_text("value = 1")
    (folder / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    return folder


def wait_for_message(launch: Running, text: str, count: int = 1) -> None:
    wait_until(lambda: launch.stderr.count(text) >= count, lambda: f"{text} in:\n{launch.stderr}")


def test_changes_launch_again(project: Path, tmp_path: Path) -> None:
    """Changes of an imported module count, those of other files do not.

    After an end or an error, meshrun waits for the next change. Ctrl-C ends it.
    """
    part = project / "package" / "part.py"
    with start_meshrun("--watch", "--nproc-per-node", "2", "train.py", folder=tmp_path) as launch:
        launch.wait_for("part 1", 2)
        (project / "other.py").write_text("")
        part.write_text("value = 1")
        part.write_text("value = 3")
        launch.wait_for("part 3", 2)
        part.write_text("value =")
        wait_for_message(launch, "exited with code 1; waiting for a change in 3 files")
        part.write_text("value = 2")
        wait_for_message(launch, "finished; waiting for a change")
        (project / "train.py").write_text("import missing")
        wait_for_message(launch, "exited with code 1; waiting", 2)
        (project / "missing.py").write_text(
            "import time\nprint('found', flush=True)\ntime.sleep(99)"
        )
        launch.wait_for("found", 2)
        launch.signal(signal.SIGINT)

        assert launch.wait() == 128 + signal.SIGINT
        lines = launch.stdout.splitlines()
        messages = launch.stderr.splitlines()
    assert sorted(lines) == [
        *("[rank 0] found", "[rank 0] part 1 on 0", "[rank 0] part 2 on 0", "[rank 0] part 3 on 0"),
        *("[rank 1] found", "[rank 1] part 1 on 1", "[rank 1] part 2 on 1", "[rank 1] part 3 on 1"),
    ]
    changes = [line for line in messages if "changed" in line]
    assert changes == [
        "meshrun: package/part.py changed: stopping 2 ranks, up to 30 s",
        "meshrun: package/part.py changed: stopping 2 ranks, up to 30 s",
        "meshrun: package/part.py changed; launching again",
        "meshrun: train.py changed; launching again",
        "meshrun: missing.py changed; launching again",
    ]
    assert "error: stopped by SIGTERM" not in launch.stderr


def test_a_temporary_folder_that_was_removed_does_not_end_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message then names the signal instead of the changed file."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    part = project / "package" / "part.py"
    with start_meshrun("--watch", "train.py", folder=tmp_path) as launch:
        launch.wait_for("part 1")
        (project / "train.py").write_text(PROGRAM.replace("print(", "print('again',"))
        launch.wait_for("again part 1")
        for folder in temporary.iterdir():
            shutil.rmtree(folder)
        (project / "train.py").write_text(PROGRAM)
        launch.wait_for("part 1", 3)
        part.write_text("value = 2")
        wait_for_message(launch, "finished; waiting for a change")
        launch.signal(signal.SIGINT)

        assert launch.wait() == 128 + signal.SIGINT
    assert "SIGTERM: stopping" in launch.stderr


@pytest.mark.nightly
def test_sigkill_or_a_fatal_error_ends_it(project: Path, tmp_path: Path) -> None:
    """SIGKILL leaves nothing behind; an error that no change of the program can fix ends it too."""
    with start_meshrun("--watch", "train.py", folder=tmp_path) as launch:
        launch.wait_for("part 1")
        launch.process.kill()
    with start_meshrun("--watch", "--log-dir", "/proc/none", "train.py", folder=tmp_path) as launch:
        assert launch.wait() == 2
        assert launch.stderr.startswith("error: cannot write to --log-dir")


@pytest.mark.nightly
def test_ctrl_c_in_a_debugger_does_not_end_it(project: Path) -> None:
    """It clears the line; after a change, the rank has the terminal again."""
    (project / "train.py").write_text("x = 5\nbreakpoint()\nprint('x was', x)\n")
    with open_terminal("--watch", "--debug-rank", "0", "train.py") as terminal:
        terminal.wait_for("(Pdb)")
        terminal.type("\x03")
        terminal.wait_for("--KeyboardInterrupt--")
        (project / "train.py").write_text("x = 6\nbreakpoint()\nprint('x was', x)\n")
        terminal.wait_for("(Pdb)", 3)
        terminal.type("c\n")
        terminal.wait_for("x was 6")
        terminal.wait_for("finished; waiting")
        terminal.type("\x03")
        assert terminal.wait() == 128 + signal.SIGINT
