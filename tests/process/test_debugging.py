"""The terminal of a debugged rank: who may have it, and that it comes back as it was."""

import os
import signal
import subprocess
import termios
from pathlib import Path

import psutil
import pytest

from tests.kit import PROGRAMS, command, run_meshrun, wait_until
from tests.terminal import Terminal, open_terminal

PROMPT = "(Pdb)"
THREE = ("--nproc-per-node", "3", "--debug-rank", "1")


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    """A program that stops in pdb, in every rank that may."""
    program = tmp_path / "asking.py"
    program.write_text(
        "import os, pdb\nprint('before', os.environ['RANK'])\npdb.set_trace()\nprint('after')\n"
    )
    return program


def rank_at_prompt(terminal: Terminal) -> psutil.Process:
    """Return the process that waits at the prompt: the one whose stdin is the terminal."""
    terminal.wait_for(PROMPT)
    name = os.ttyname(terminal.slave)
    below = psutil.Process(terminal.process.pid).children(recursive=True)
    found = [child for child in below if stdin_of(child) == name]
    assert len(found) == 1
    return found[0]


def stdin_of(process: psutil.Process) -> str | None:
    """Return what a process reads, ``None`` if it has ended meanwhile."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/0")
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_set_trace_stops_one_rank_alone(fake_torch: object, asking: Path, method: str) -> None:
    """``pdb.set_trace()`` does nothing in the others, which have no stdin to read."""
    with open_terminal(*THREE, "--start-method", method, asking) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("c\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert lines.count("before 1") == 1
    assert sorted(line for line in lines if line.endswith("after")) == [
        "[rank 0] after",
        "[rank 2] after",
        "after",
    ]


def test_a_rank_killed_at_its_prompt_leaves_the_terminal_clean(
    fake_torch: object, asking: Path
) -> None:
    """SIGKILL in readline: the modes of the terminal are restored, and the report is legible."""
    with open_terminal(*THREE, asking) as terminal:
        rank = rank_at_prompt(terminal)
        wait_until(
            lambda: not termios.tcgetattr(terminal.slave)[3] & termios.ICANON, lambda: "readline"
        )
        rank.kill()
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 128 + signal.SIGKILL
    assert terminal.modes_left == terminal.modes
    assert any(line.startswith("error: rank 1 was ended by SIGKILL") for line in lines)


def test_ctrl_c_in_a_running_program_stops_it_in_pdb(fake_torch: object, tmp_path: Path) -> None:
    """Without any breakpoint Ctrl-C opens pdb where the rank is, and ``c`` goes on."""
    stop = tmp_path / "stop"
    arguments = (*THREE, PROGRAMS / "spinning.py")
    with open_terminal(*arguments, env={"STOP_FILE": str(stop)}) as terminal:
        terminal.wait_for("spinning", 3)
        terminal.type("\x03")
        terminal.wait_for("Program interrupted")
        terminal.wait_for(PROMPT)
        terminal.type("p steps > 0\n")
        terminal.wait_for("True")
        stop.touch()
        terminal.type("c\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert sum("stopped" in line for line in lines) == 3


def test_ctrl_c_three_times_ends_the_launch(fake_torch: object, asking: Path) -> None:
    """A rank that does not go away by itself does not keep a person from leaving."""
    with open_terminal(*THREE, asking) as terminal:
        rank_at_prompt(terminal)
        terminal.type("\x03")
        terminal.wait_for("--KeyboardInterrupt--")
        terminal.type("\x03")
        terminal.wait_for("one more Ctrl-C")
        terminal.type("\x03")
        code = terminal.wait()

    assert code == 128 + signal.SIGINT
    assert terminal.modes_left == terminal.modes


def test_the_others_are_quiet_while_a_line_is_typed(fake_torch: object, tmp_path: Path) -> None:
    """What another rank prints meanwhile comes after the line is entered."""
    go = tmp_path / "go"
    program = tmp_path / "talking.py"
    program.write_text(
        "import os, pdb, time\n"
        "pdb.set_trace()\n"
        "if os.environ['RANK'] == '0':\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "    print('told', flush=True)\n"
        f"    open({str(tmp_path / 'told')!r}, 'w').close()\n"
    )
    with open_terminal("--nproc-per-node", "2", "--debug-rank", "1", program) as terminal:
        rank_at_prompt(terminal)
        go.touch()
        wait_until((tmp_path / "told").exists, lambda: "rank 0")
        terminal.type("p 6 * 7\n")
        terminal.wait_for("42")
        before = terminal.all_lines
        terminal.type("c\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert "[rank 0] told" in lines
    assert f"{PROMPT} p 6 * 7" in before  # in one piece


def test_without_a_terminal_it_is_an_error(fake_torch: object, asking: Path) -> None:
    """stdin that is a file or a pipe gives a debugger nothing to read."""
    result = run_meshrun(*THREE, asking, stdin=subprocess.DEVNULL)
    said = result.stderr.splitlines()

    assert result.returncode == 2
    assert "error: --debug-rank 1: the rank is given the terminal, and stdin is none" in said
    assert "hint: start it without `<` or a pipe before it; over ssh, `ssh -t`" in said


@pytest.mark.parametrize(("which", "said"), [("3", "0 to 2"), ("rank=0-1", "ranks 0, 1")])
def test_it_must_be_one_rank(fake_torch: object, asking: Path, which: str, said: str) -> None:
    """A rank that is not there, or several, are refused before anything starts."""
    result = subprocess.run(
        command("--nproc-per-node", "3", "--debug-rank", which, asking),
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    assert f"error: --debug-rank {which}: " in result.stderr
    assert said in result.stderr
    assert result.stdout == ""
