"""``meshrun --interactive``: a prompt whose input runs on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit import command, poison, run_meshrun
from tests.terminal import Terminal, open_terminal

pytestmark = pytest.mark.torch
ON_TWO = ("--interactive", "--mesh", "dp=2", "--device", "cpu")
SCRIPT = """\
import sys
import time
import torch
import meshrun

mesh = meshrun.current_mesh()


def inverse(n):
    return 1 / n


def wait():
    torch.distributed.barrier()
    print("waiting", flush=True)
    while True:
        time.sleep(0.01)


print("began with", sys.argv[1:])
"""


def test_a_prompt_after_a_script(tmp_path: Path) -> None:
    """It has the script's names; results are shown by coordinate; Ctrl-C ends one input.

    Characters that the terminal's encoding lacks end neither the prompt nor the ranks.
    """
    script = tmp_path / "begin.py"
    script.write_text(SCRIPT)
    # Without py-spy, whose stacks would contain frames of meshrun.
    env = {"HOME": str(tmp_path), "PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    with open_terminal(*ON_TWO, script, "one", env=env) as terminal:
        terminal.wait_for("Ctrl-D ends them\n>>>")
        for typed, shown in (
            ("mesh.get_local_rank()\n", "[dp1] 1"),
            ("_ * 0 + 7\n", "[all] 7"),
            ("import asyncio\nawait asyncio.sleep(0, 8)\n", "[all] 8"),
            ("for n in range(2):\n    print('n is', n)\n\n", "[dp1] n is 1\n"),
            ("1 +\n", "SyntaxError: in"),  # invalid syntax, or incomplete input
            ("'é'\n", "UnicodeEncodeError: "),
            ("chr(233)\n", "[all] '\\xe9'"),
            ("inverse(0)\n", "ZeroDivisionError: division by zero\ndp"),
            ("wait()\n", "[dp1] waiting"),
            ("\x1c", "in wait\n    <cell 8>:1 in <module>\n"),
            ("\x03", "KeyboardInterrupt"),
            ("%rank 2\n", "error: %rank 2: ranks range from 0 to 1\n"),
            ("%rank dp=2\n", "\n    %rank dp=2\n             ^\n"),
            ("%rank dp=1\n", "\n[dp1] >>>"),
            ("mesh.get_lo\t) + 10\n", "[dp1] 11"),
            ("breakpoint()\n", "(Pdb)"),
            ("p mesh.get_local_rank() + 30\n", "\n31\n(Pdb)"),
            ("\x03", "--KeyboardInterrupt--\n(Pdb)"),
            ("c\n", "(Pdb) c\n[dp1] >>>"),
            ("%rank\n", "\n>>>"),
            ("\x1b[A\x1b[A\x1b[A\n", "[dp0] 10"),
            ("wait()\n", "[dp1] waiting"),
            # Not pdb, although the rank was in it before. Before the prompt, Ctrl-D would be lost.
            ("\x03", "KeyboardInterrupt\n>>>"),
        ):
            before = "\n".join(terminal.all_lines).count(shown)
            terminal.type(typed)
            terminal.wait_for(shown, before + 1)
        terminal.type("\x04")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert lines.count("[dp0] began with ['one']") == lines.count("[dp1] began with ['one']") == 1
    assert [line for line in lines[1:] if "meshrun/" in line] == []
    assert terminal.modes_left == terminal.modes
    assert "inverse(0)\nwait()\n" in (tmp_path / ".meshrun_history").read_text()


def test_piped_input_runs_as_a_script(fake_torch: Path) -> None:
    """As a whole, without values of expressions; an exception sets the exit code."""
    piped = (
        "from dataclasses import dataclass\nimport os\n"
        "for n in range(1):\n    print('rank', os.environ['RANK'])\n"
        "def add(n: int): return n\n"
        "assert add.__annotations__ == {'n': int}\n"
        "add(5)\n"
        "raise SystemExit(3)\n"
    )
    ran = run_meshrun("--interactive", "--nproc-per-node", "2", "-", input=piped)

    assert (ran.returncode, ran.stderr) == (3, "")
    assert sorted(ran.stdout.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]


@pytest.mark.nightly
def test_the_prompt_itself_imports_nothing_of_the_working_folder(
    fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others may have put modules; what is typed may, as at Python's own prompt."""
    (shared := tmp_path / "shared").mkdir()
    poison(shared)
    (shared / "grades.py").write_text("number = 41\n")
    monkeypatch.chdir(shared)
    meshrun = os.path.join(os.path.dirname(sys.executable), "meshrun")  # unlike `python -m meshrun`
    words = [meshrun, "--interactive", "--nproc-per-node", "2"]
    with ExitStack() as ends:
        terminal = Terminal(words, {}, 100, 30)
        ends.callback(terminal.end)
        terminal.wait_for("Ctrl-D ends them\n>>>")
        terminal.type("from grades import number\nnum\t + 1\n")
        terminal.wait_for("[all] 42")
        terminal.type("1/0\n")
        terminal.wait_for("ZeroDivisionError: division by zero\n>>>")
        terminal.type("\x04")
        assert terminal.wait() == 0

    assert not (shared / "imported").exists(), (shared / "imported").read_text()


def test_a_closed_stdin_is_empty(fake_torch: Path) -> None:
    """With ``<&-``, the prompt ends at once, as Python's does."""
    words = ["sh", "-c", '"$@" <&-', "sh", *command("--interactive", "--nproc-per-node", "2")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "piped", "code", "message"),
    [
        ("x = 1", "print('x is', x)\n1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("x = 1", "x +", 1, "SyntaxError: invalid syntax"),
        ("1 / 0", "print('never')", 1, 'begin.py", line 1, in <module>'),
        ("import sys\nsys.exit('enough')", "print('never')", 1, "enough"),
        ("import sys\nsys.exit(5)", "print('never')", 5, ""),
        ("import sys\nsys.exit()", "print('x is', 1)", 0, ""),
        ("x = 1", "raise SystemExit", 0, ""),
        ("x =", "print('never')", 1, "SyntaxError: invalid syntax"),
        ("x = 1", "import os\nos._exit(4)", 4, "exited with code 4"),
        ("import os\nos._exit(4)", "print('never')", 4, "exited with code 4"),
        ("import atexit, os", "atexit.register(os._exit, 4)", 4, "exited with code 4"),
        (
            "from os import getppid, kill\nfrom signal import pause",
            "kill(getppid(), 9)\npause()",
            137,
            "was killed by SIGKILL",
        ),
    ],
)
def test_scripts_and_pipes_that_fail(
    script: str, piped: str, code: int, message: str, tmp_path: Path
) -> None:
    """Nothing after the error runs, and each error is reported once."""
    (tmp_path / "begin.py").write_text(script)
    ran = run_meshrun(*ON_TWO, tmp_path / "begin.py", input=piped)

    assert ran.returncode == code
    assert message in ran.stderr
    assert "never" not in ran.stdout
    assert ("x is 1" in ran.stdout) == ("x is" in piped)
    assert ran.stderr.count("Traceback") <= 1
    assert "failed, exit code" not in ran.stderr  # as the launcher has reported it
    assert ran.stderr.count("was killed by SIGKILL") <= 1
    assert "next input" not in ran.stderr


@pytest.mark.nightly
def test_a_killed_prompt_leaves_nothing(tmp_path: Path) -> None:
    """Whatever the ranks do; a fixture checks for processes."""
    with open_terminal(*ON_TWO, env={"HOME": str(tmp_path)}) as terminal:
        terminal.wait_for("Ctrl-D ends them\n>>>")
        terminal.type("import sys, time; print('here'); sys.stdout.close(); time.sleep(99)\n")
        terminal.wait_for("[dp1] here")
        terminal.process.kill()
        terminal.wait()


@pytest.mark.nightly
def test_a_prompt_that_is_stopped_restores_the_terminal(fake_torch: Path, tmp_path: Path) -> None:
    """Line editing has its own modes, in which the shell's next command would show no input."""
    words = ("--interactive", "--nproc-per-node", "1")
    with open_terminal(*words, env={"HOME": str(tmp_path)}) as terminal:
        terminal.wait_for("Ctrl-D ends them\n>>>")
        terminal.process.terminate()
        assert terminal.wait() == 143
        assert terminal.modes_left == terminal.modes


@pytest.mark.nightly
def test_ranks_that_cannot_be_interrupted_are_replaced(tmp_path: Path) -> None:
    """Such as a rank in a collective whose peer has failed or was interrupted."""
    script = tmp_path / "begin.py"
    script.write_text("import torch.distributed as dist\n1 / dist.get_rank()\ndist.barrier()\n")
    with open_terminal(*ON_TWO, script, env={"HOME": str(tmp_path)}) as terminal:
        terminal.wait_for("dp0 failed; not finished: dp1")
        terminal.wait_for("2 ranks, dp0 to dp1; every input runs on all of them")
        terminal.type("import os, time, torch.distributed as dist\n")
        terminal.type("print('in it'); dist.barrier() if dist.get_rank() else time.sleep(99)\n")
        terminal.wait_for("[dp1] in it")
        terminal.type("\x03")
        terminal.wait_for("interrupted; not finished: dp1\ndp1: barrier at <cell 2>:1\n")
        terminal.wait_for("their variables are lost", 2)
        assert "SIGTERM" not in str(terminal.all_lines)
        terminal.type("'dist' in globals()\n")
        terminal.wait_for("[all] False")
        terminal.type("exit(9)\n")
        assert terminal.wait() == 9
