"""One rank has the terminal, and the others wait for it."""

import pytest

from tests.kit import PROGRAMS
from tests.terminal import Terminal, open_terminal

MESH = ("--mesh", "dp=2,tp=2", "--device", "cpu")


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_a_breakpoint_in_one_of_four_ranks(method: str) -> None:
    """pdb answers in the chosen rank, the others skip the breakpoint, and all succeed."""
    which = ("--debug-rank", "dp=1,tp=0", "--start-method", method)
    with open_terminal(*MESH, *which, PROGRAMS / "debugged.py") as terminal:
        terminal.wait_for("(Pdb)")
        terminal.type("p x + 1\n")
        terminal.wait_for("(Pdb)", 2)
        terminal.type("\x1b[A\n")  # the arrow brings the last line back
        terminal.wait_for("(Pdb)", 3)
        terminal.type("c\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert lines.count("21") == 2
    assert lines.count("begin 2") == 1
    assert [line for line in lines if line.endswith("begin 2")] == ["begin 2"]
    assert sorted(line for line in lines if line.endswith("total 60")) == [
        "[dp0 tp0] total 60",
        "[dp0 tp1] total 60",
        "[dp1 tp1] total 60",
        "total 60",
    ]
    assert terminal.modes_left == terminal.modes


@pytest.mark.nightly
@pytest.mark.torch
def test_q_ends_the_launch_and_says_so() -> None:
    """One line names the rank, without bdb's traceback."""
    with open_terminal(*MESH, "--debug-rank", "1", PROGRAMS / "debugged.py") as terminal:
        terminal.wait_for("(Pdb)")
        terminal.type("q\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 1
    assert "error: rank 1 [dp0 tp1] was quit from its debugger, exit code 1" in lines
    assert not any("bdb.py" in line for line in lines)
    assert terminal.modes_left == terminal.modes


def end_prompt(terminal: Terminal) -> None:
    """Press Ctrl-C at the prompt, which pdb handles, and continue."""
    terminal.type("\x03")
    terminal.wait_for("--KeyboardInterrupt--")
    terminal.type("c\n")


@pytest.mark.torch
@pytest.mark.nightly
def test_ctrl_c_at_the_prompt_is_pdbs() -> None:
    """Ctrl-C clears the line that is being typed, and the launch continues."""
    with open_terminal(*MESH, "--debug-rank", "0", PROGRAMS / "debugged.py") as terminal:
        terminal.wait_for("(Pdb)")
        end_prompt(terminal)
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert "total 60" in lines
