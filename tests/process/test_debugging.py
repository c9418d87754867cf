"""Which rank has stdin, and the terminal of a debugged rank, which is restored afterwards."""

import os
import shlex
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
    """A program that stops in pdb in every rank that has stdin."""
    program = tmp_path / "asking.py"
    program.write_text(
        "import os, pdb, time\nprint('before', os.environ['RANK'])\n"
        f"while os.environ['RANK'] == '1' and not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "    time.sleep(0.01)\n"
        "pdb.set_trace()\nprint('after')\n"
    )
    return program


def let_ask(terminal: Terminal, program: Path) -> None:
    """Let rank 1 stop after the others have printed: their lines could mix with its prompt."""
    terminal.wait_for("[rank 0] after")
    terminal.wait_for("[rank 2] after")
    (program.parent / "go").touch()
    terminal.wait_for(PROMPT)


def rank_at_prompt(terminal: Terminal) -> psutil.Process:
    """Return the process that waits at the prompt: the one whose stdin is the terminal."""
    terminal.wait_for(PROMPT)
    name = os.ttyname(terminal.slave)
    below = psutil.Process(terminal.process.pid).children(recursive=True)
    found = [child for child in below if stdin_of(child) == name]
    assert len(found) == 1
    return found[0]


def stdin_of(process: psutil.Process) -> str | None:
    """Return the file that a process has as stdin, ``None`` if the process has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/0")
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_set_trace_stops_one_rank_alone(fake_torch: object, asking: Path, method: str) -> None:
    """``pdb.set_trace()`` does nothing in the others, which have no stdin to read."""
    with open_terminal(*THREE, "--start-method", method, asking) as terminal:
        let_ask(terminal, asking)
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
    """After SIGKILL in readline, the terminal's modes are restored before the report."""
    with open_terminal(*THREE, asking) as terminal:
        let_ask(terminal, asking)
        rank = rank_at_prompt(terminal)
        wait_until(
            lambda: not termios.tcgetattr(terminal.slave)[3] & termios.ICANON, lambda: "readline"
        )
        rank.kill()
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 128 + signal.SIGKILL
    assert terminal.modes_left == terminal.modes
    assert any(line.startswith("error: rank 1 was killed by SIGKILL") for line in lines)


def test_ctrl_c_in_a_running_program_stops_it_in_pdb(fake_torch: object, tmp_path: Path) -> None:
    """Ctrl-C opens pdb where the rank is, without a breakpoint, and ``c`` continues."""
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
    """Even if the debugged rank does not end by itself."""
    with open_terminal(*THREE, asking) as terminal:
        let_ask(terminal, asking)
        rank_at_prompt(terminal)
        terminal.type("\x03")
        terminal.wait_for("--KeyboardInterrupt--")
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C once more")
        terminal.type("\x03")
        code = terminal.wait()

    assert code == 128 + signal.SIGINT
    assert terminal.modes_left == terminal.modes


def test_the_others_are_quiet_while_a_line_is_typed(fake_torch: object, tmp_path: Path) -> None:
    """Output of other ranks appears once the line is entered."""
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
        terminal.type("p 6 * 7 * 10**9\n")
        terminal.wait_for("42000000000")
        before = terminal.all_lines
        terminal.type("c\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    # Rank 1 may print its next prompt at the same moment.
    assert any(line.endswith("[rank 0] told") for line in lines)
    assert f"{PROMPT} p 6 * 7 * 10**9" in before  # in one piece


def test_debug_rank_without_a_terminal_is_an_error(fake_torch: object, asking: Path) -> None:
    result = run_meshrun(*THREE, asking, stdin=subprocess.DEVNULL)
    lines = result.stderr.splitlines()

    assert result.returncode == 2
    assert "error: --debug-rank 1 needs a terminal, but stdin is not one" in lines
    assert "hint: run meshrun without redirecting or piping stdin; over ssh, use `ssh -t`" in lines


SKIPPED = "skipped a breakpoint: only rank 0 has stdin; --debug-rank"


@pytest.mark.parametrize(
    "stop",
    [
        "breakpoint()",
        pytest.param("import pdb; pdb.set_trace()", marks=pytest.mark.nightly),
        # as torch.distributed.breakpoint() does
        pytest.param("import pdb; pdb.Pdb().set_trace()", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_a_plain_breakpoint_has_one_prompt(
    fake_torch: object, tmp_path: Path, stop: str, method: str
) -> None:
    """Only rank 0 stops; the others skip it, and one line says how to stop in one of them."""
    program = tmp_path / "stopping.py"
    program.write_text(f"{stop}\nprint('af' + 'ter')\n")  # pdb may show either line
    arguments = ("--nproc-per-node", "4", "--start-method", method, program)
    with open_terminal(*arguments, columns=200) as terminal:
        terminal.wait_for("[rank 0] (Pdb)")
        terminal.wait_for("] after", 3)
        terminal.type("c\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert sum("(Pdb)" in line for line in lines) <= 2  # where `c` was typed, and redrawn once
    assert sum(SKIPPED in line for line in lines) == 1
    assert sum(line.endswith("] after") for line in lines) >= 3


def test_ctrl_c_after_a_breakpoint_ends_the_launch(fake_torch: object, tmp_path: Path) -> None:
    """pdb does not keep its SIGINT handler after it returns to the program."""
    program = tmp_path / "stopping.py"
    program.write_text("import time\nbreakpoint()\nprint('go' + 'ing')\ntime.sleep(600)\n")
    with open_terminal("--nproc-per-node", "2", program) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("c\n")
        terminal.wait_for("going", 2)
        terminal.type("\x03")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 128 + signal.SIGINT
    assert not any("Program interrupted" in line for line in lines), lines


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_piped_input_goes_to_rank_0_whole(fake_torch: object, tmp_path: Path, method: str) -> None:
    """``echo data | meshrun``: the others read an empty stdin."""
    program = tmp_path / "read.py"
    program.write_text("import sys\nprint(len(sys.stdin.read()))\n")
    result = run_meshrun(
        *("--nproc-per-node", "3", "--start-method", method, program), input="data\n" * 50_000
    )

    assert sorted(result.stdout.splitlines()) == ["[rank 0] 250000", "[rank 1] 0", "[rank 2] 0"]
    assert result.stderr == ""


def test_an_eof_error_names_the_rank_that_has_stdin(fake_torch: object, tmp_path: Path) -> None:
    """The report says why stdin is empty, and what to try."""
    program = tmp_path / "ask.py"
    program.write_text(
        "import os, time\nif os.environ['RANK'] == '0': time.sleep(600)\ninput('? ')\n"
    )
    result = run_meshrun("--nproc-per-node", "2", program, input="yes\n")

    assert result.returncode == 1
    assert (
        "error: rank 1 raised EOFError: EOF when reading a line (only rank 0 has stdin;"
        " --debug-rank 1 gives rank 1 the terminal), exit code 1\n"
    ) in result.stderr


def test_a_background_job_leaves_the_keys_to_the_shell(fake_torch: object, tmp_path: Path) -> None:
    """The shell reads what is typed; the job's stdin is empty."""
    program = tmp_path / "read.py"
    program.write_text("import sys\nprint('read', len(sys.stdin.read()))\n")
    terminal = Terminal(["bash", "--norc", "-i"], {"PS1": "now:"}, 200, 30)
    try:
        terminal.wait_for("now:")
        terminal.type(f"{shlex.join(command('--nproc-per-node', '2', program))} &\n")
        terminal.wait_for("read 0", 2)
        terminal.type("echo 6 $((6 * 7))\n")
        terminal.wait_for("6 42")
        terminal.type("wait; exit\n")
        terminal.wait()
    finally:
        terminal.end()


@pytest.mark.parametrize(("which", "message"), [("3", "0 to 2"), ("rank=0-1", "ranks 0, 1")])
def test_debug_rank_must_be_one_rank(
    fake_torch: object, asking: Path, which: str, message: str
) -> None:
    """A rank that does not exist, or several ranks, are refused before anything starts."""
    result = subprocess.run(
        command("--nproc-per-node", "3", "--debug-rank", which, asking),
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    assert f"error: --debug-rank {which}: " in result.stderr
    assert message in result.stderr
    assert result.stdout == ""
