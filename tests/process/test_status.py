"""--status: a panel at the bottom of a terminal, plain lines elsewhere."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, command, run_meshrun, start_meshrun, wait_until
from tests.terminal import open_terminal

OFTEN = ("--status", "--status-interval", "0.05")
HEAD = "-- "


@pytest.fixture
def until(tmp_path: Path) -> Path:
    """A program that prints its steps until a file exists."""
    program = tmp_path / "until.py"
    program.write_text(
        "import os, sys, time\n"
        "rank, step = os.environ['RANK'], 0\n"
        f"while not os.path.exists({str(tmp_path / 'stop')!r}):\n"
        "    step += 1\n"
        "    print(f'step {step} of {rank}', flush=True)\n"
        "    time.sleep(float(os.environ.get('PAUSE', 0.02)))\n"
        "print('last of', rank)\n"
        "sys.exit(int(os.environ.get('CODE', 0)) if rank == '0' else 0)\n"
    )
    return program


@pytest.mark.parametrize("columns", [60, 200])
def test_the_panel_stays_below_and_leaves_no_trace(
    fake_torch: object, tmp_path: Path, until: Path, columns: int
) -> None:
    """Every line is printed whole, in order and once; at the end, the panel disappears."""
    arguments = (*OFTEN, "--nproc-per-node", "4", until)
    with open_terminal(*arguments, columns=columns, rows=24) as terminal:
        terminal.wait_for("step 40 of 3")
        terminal.wait_for("4 running")
        terminal.wait_for("rank  ")
        (tmp_path / "stop").touch()
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert not any(line.startswith(HEAD) for line in lines)
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        steps = [f"[rank {rank}] step {step + 1} of {rank}" for step in range(len(mine) - 1)]
        assert mine == [*steps, f"[rank {rank}] last of {rank}"]
    assert len(lines) == sum(line.startswith("[rank ") for line in lines)


def test_the_report_comes_last(fake_torch: object, tmp_path: Path, until: Path) -> None:
    """The panel disappears before the report of a failure."""
    arguments = (*OFTEN, "--nproc-per-node", "2", until)
    with open_terminal(*arguments, env={"CODE": "3"}) as terminal:
        terminal.wait_for("2 running")
        (tmp_path / "stop").touch()
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 3
    assert lines[-2].startswith("error: rank 0 exited with code 3")
    assert not any(line.startswith(HEAD) for line in lines)


def test_ctrl_c_leaves_the_terminal_clean(fake_torch: object, until: Path) -> None:
    """The last line says that Ctrl-C stopped the launch."""
    with open_terminal(*OFTEN, "--nproc-per-node", "2", until) as terminal:
        terminal.wait_for("2 running")
        terminal.type("\x03")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 128 + signal.SIGINT
    assert lines[-1] == "meshrun: stopped by Ctrl-C, SIGINT"
    assert [line for line in lines if line.startswith(HEAD)] == [], terminal.raw
    assert terminal.modes_left == terminal.modes


def test_the_panel_follows_a_resized_window(
    fake_torch: object, tmp_path: Path, until: Path
) -> None:
    """Nothing of the old panel is left between the lines."""
    with open_terminal(*OFTEN, "--nproc-per-node", "8", until, columns=150) as terminal:
        terminal.wait_for("8 running")
        terminal.resize(70, 30)
        terminal.wait_for("step 60 of 7")
        terminal.resize(150, 40)
        terminal.wait_for("step 90 of 7")
        (tmp_path / "stop").touch()
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert [line for line in lines if not line.startswith("[rank ")] == []


def test_a_line_is_typed_above_the_panel(fake_torch: object, tmp_path: Path) -> None:
    """A prompt and the text typed there stay, however often the panel is drawn."""
    program = tmp_path / "ask.py"
    program.write_text("print('hello', input('your name? '))\n")
    with open_terminal(*OFTEN, program) as terminal:
        terminal.wait_for("your name?")
        terminal.wait_for("1 running")
        terminal.type("Ad")
        terminal.wait_for("your name? Ad")
        drawn = terminal.raw.count(b"1 running")
        wait_until(lambda: terminal.raw.count(b"1 running") > drawn + 3, lambda: "the panel")
        assert any(line.endswith("your name? Ad") for line in terminal.shown)
        terminal.type("a\n")
        code = terminal.wait()
        lines = terminal.all_lines

    assert code == 0
    assert any(line.endswith("hello Ada") for line in lines)
    assert not any(line.startswith(HEAD) for line in lines)


def test_a_terminal_that_hangs_up_does_not_end_the_launch(
    fake_torch: object, tmp_path: Path, until: Path
) -> None:
    """If SIGHUP is ignored, as under nohup."""
    terminal, ours = os.openpty()
    words = command(*OFTEN, "--nproc-per-node", "2", until)
    with open(tmp_path / "stdout", "wb") as out:
        process = subprocess.Popen(
            ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *words],
            env={**os.environ, "TERM": "xterm"},
            stdin=ours,
            stdout=out,
            stderr=ours,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
    os.close(ours)
    shown = b""
    while b"2 running" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    seen = (tmp_path / "stdout").read_text().count("step")
    wait_until(
        lambda: (
            (tmp_path / "stdout").read_text().count("step") > seen + 100
            or process.poll() is not None
        ),
        lambda: "steps after that",
    )
    (tmp_path / "stop").touch()

    assert process.wait() == 0
    assert (tmp_path / "stdout").read_text().count("last of") == 2


def test_many_ranks_are_merged(fake_torch: object, tmp_path: Path, until: Path) -> None:
    """If a grid does not fit, ranks with the same state share a line."""
    arguments = (*OFTEN, "--nproc-per-node", "24", until)
    with open_terminal(*arguments, env={"PAUSE": "0.5"}, columns=60, rows=20) as terminal:
        terminal.wait_for("24 running")
        terminal.wait_for("all x24")
        (tmp_path / "stop").touch()
        code = terminal.wait()

    assert code == 0


@pytest.mark.parametrize("term", ["dumb", None])
def test_plain_lines_elsewhere(
    fake_torch: object, tmp_path: Path, until: Path, term: str | None
) -> None:
    """Without a terminal, or on one that cannot move its cursor."""
    form = re.compile(
        r"meshrun: status: (\d starting, )?(\d running, )?(\d ended, )?"
        r"(CPU \d+ %, )?(memory \S+, )?\d+:\d\d"
    )
    arguments = (*OFTEN, "--nproc-per-node", "3", until)
    full = re.compile(r"3 running, CPU \d+ %, memory ")
    if term is None:
        with start_meshrun(*arguments, folder=tmp_path) as running:
            wait_until(lambda: full.search(running.stderr) is not None, lambda: running.stderr)
            (tmp_path / "stop").touch()
            assert running.wait() == 0
        lines = running.stderr.splitlines()
    else:
        with open_terminal(*arguments, env={"TERM": term}) as terminal:
            wait_until(
                lambda: full.search("\n".join(terminal.all_lines)) is not None,
                lambda: "\n".join(terminal.all_lines),
            )
            (tmp_path / "stop").touch()
            assert terminal.wait() == 0
            lines = [line for line in terminal.all_lines if not line.startswith("[rank ")]
            assert b"\x1b" not in terminal.raw

    status = [line for line in lines if line.startswith("meshrun: status: ")]
    assert [line for line in status if not form.fullmatch(line)] == []
    assert any(full.search(line) for line in status)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--status-interval", "5"), "--status-interval requires --status"),
        (
            ("--status", "--debug-rank", "0"),
            "--status cannot be used with --debug-rank: both need the terminal",
        ),
    ],
)
def test_options_that_exclude_each_other(flags: tuple[str, ...], message: str) -> None:
    result = run_meshrun(*flags, PROGRAMS / "echo.py")

    assert result.returncode == 2
    assert f"error: {message}" in result.stderr


def test_a_launch_without_status_does_not_import_its_libraries() -> None:
    """rich and psutil."""
    check = (
        "import sys, meshrun.app, meshrun.supervisor.loop\n"
        "print([name for name in ('rich', 'psutil') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, env=os.environ
    )

    assert result.stdout == "[]\n"
