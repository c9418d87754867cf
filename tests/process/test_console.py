"""Ranks' output on meshrun's stdout and stderr."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pyte
import pytest

from meshrun.console.console import Console
from tests.kit import (
    PROGRAMS,
    command,
    is_full,
    let_pass,
    lines_of,
    run_meshrun,
    wait_until,
    within,
)
from tests.terminal import Terminal, open_terminal


def test_stdout_and_stderr_stay_apart(fake_torch: object) -> None:
    """Each line starts with its rank."""
    ours = run_meshrun("--nproc-per-node", "3", PROGRAMS / "echo.py")

    assert sorted(ours.stdout.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    assert sorted(ours.stderr.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(3)]


def test_no_prefix_leaves_lines_unchanged(fake_torch: object) -> None:
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", PROGRAMS / "echo.py")

    assert sorted(ours.stdout.splitlines()) == ["out 0", "out 1"]


@pytest.mark.parametrize("more", [[], ["--no-prefix"]])
def test_output_common_to_all_ranks_that_fail_is_printed_once(
    fake_torch: object, tmp_path: Path, more: list[str]
) -> None:
    """Such as argparse's usage; the report does not repeat it either."""
    program = tmp_path / "args.py"
    program.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', required=True)\nparser.parse_args()\n"
    )
    ours = run_meshrun("--nproc-per-node", "4", *more, program)

    assert ours.returncode == 2
    assert ours.stderr.count("usage: args.py") == 1, ours.stderr
    assert ours.stderr.count("args.py: error: the following arguments are required: --lr") == 1
    assert "last lines" not in ours.stderr


def test_ranks_that_continue_keep_all_their_lines(fake_torch: object, tmp_path: Path) -> None:
    """A warning that every rank prints comes before that rank's next line or its end."""
    program = tmp_path / "warn.py"
    program.write_text(
        "import os, sys\nprint('careful', file=sys.stderr, flush=True)\n"
        "if os.environ['RANK'] < '2': print('on', file=sys.stderr)\n"
    )
    lines = run_meshrun("--nproc-per-node", "4", program).stderr.splitlines()

    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] careful", f"[rank {rank}] on"][: 2 if rank < 2 else 1]


def test_lines_written_in_halves_are_joined(fake_torch: object) -> None:
    """Four ranks write their lines in two halves at the same time."""
    ours = run_meshrun("--nproc-per-node", "4", PROGRAMS / "half_lines.py")
    labels = [f"rank {rank}" for rank in range(4)]

    for rank, lines in enumerate(lines_of(ours.stdout, labels).values()):
        assert lines == [f"first-{n}-{rank} second-{n}-{rank}" for n in range(30)]


def test_invalid_utf_8_and_progress_bars_pass_through(fake_torch: object) -> None:
    """A bar keeps all its states, invalid UTF-8 its bytes, and an open last line is terminated."""
    result = subprocess.run(
        command("--start-method", "exec", PROGRAMS / "bars.py"), capture_output=True, check=True
    )

    assert result.stdout == (
        b"[rank 0] 10%\r[rank 0] 50%\r[rank 0] 100%\n"
        b"[rank 0] bad \xff\xfe bytes\n"
        b"[rank 0] windows\r\n"
        b"[rank 0] snow \xe2\x98\x83\n"
        b"[rank 0] no end\n"
    )


@pytest.mark.slow
def test_a_slow_reader_loses_nothing(fake_torch: object) -> None:
    """Two ranks print 8 MB into a pipe that is read late and slowly."""
    count = 40_000
    with subprocess.Popen(
        command("--nproc-per-node", "2", PROGRAMS / "print_much.py", str(count)),
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        data = b""
        while chunk := process.stdout.read(1 << 16):
            data += chunk
    found = lines_of(data.decode(), ["rank 0", "rank 1"])

    assert process.returncode == 0
    for rank in range(2):
        assert found[f"rank {rank}"] == [f"{rank}:{n}".ljust(99, ".") for n in range(count)]


@pytest.mark.parametrize(
    "flags",
    [(), ("--status", "--status-interval", "0.05"), ("--hosts", "localhost"), ("--watch",)],
)
def test_a_reader_that_exits_ends_the_launch(
    flags: tuple[str, ...], fake_torch: object, tmp_path: Path
) -> None:
    """``meshrun ... | head`` ends by SIGPIPE, like any program in a pipe; the report says so."""
    report = tmp_path / "report.json"
    words = (*flags, "--nproc-per-node", "2", "--report", report)
    with subprocess.Popen(
        command(*words, PROGRAMS / "print_much.py", "100000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        last = process.stderr.read().decode().splitlines()[-1]
        assert process.wait(timeout=60) == -13
    assert last == "meshrun: stopped by a closed output pipe, SIGPIPE"
    assert json.loads(report.read_text())["exit_code"] == 128 + signal.SIGPIPE


def test_a_reader_that_has_exited_ends_the_help() -> None:
    """``meshrun --help | true`` ends by SIGPIPE too."""
    gone, pipe = os.pipe()
    os.close(gone)
    ours = subprocess.run(command("--help"), stdout=pipe, stderr=subprocess.PIPE, check=False)
    os.close(pipe)

    assert (ours.returncode, ours.stderr) == (-13, b"")


def test_a_reader_that_has_exited_ends_the_help_in_a_container() -> None:
    """The kernel drops a signal that PID 1 sends itself, so the exit code shows it instead."""
    around = within("--user", "--map-root-user", "--pid", "--fork", prepare=":")
    gone, pipe = os.pipe()
    os.close(gone)
    words = [*around, *command("--version")]
    ours = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, check=False)
    os.close(pipe)

    assert (ours.returncode, ours.stderr) == (128 + signal.SIGPIPE, b"")


def test_stdout_and_stderr_may_be_one_file(fake_torch: object, tmp_path: Path) -> None:
    """``> log 2>&1`` keeps lines whole, and the shell and meshrun share one file offset."""
    log = tmp_path / "log"
    with open(log, "ab") as file:
        file.write(b"before\n")
        file.flush()
        subprocess.run(
            command("--nproc-per-node", "2", PROGRAMS / "echo.py"),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
        )
    lines = log.read_text().splitlines()

    assert lines[0] == "before"
    assert sorted(lines[1:]) == sorted(
        f"[rank {rank}] {stream} {rank}" for rank in range(2) for stream in ("out", "err")
    )


def test_a_program_may_encode_its_output_itself(fake_torch: object, tmp_path: Path) -> None:
    """Its streams know that they are pipes, even if ours are files; nothing seeks in them."""
    program = tmp_path / "program.py"
    program.write_text(
        "import io, sys\n"
        "sys.stdout.reconfigure(encoding='latin-1')\n"
        "sys.stderr = io.TextIOWrapper(sys.stderr.buffer, encoding='utf-8')\n"
        "print('out', sys.stdout.name, sys.stdout.mode, sys.stdout is sys.__stdout__)\n"
        "print('err', sys.stdout.seekable(), sys.stderr.seekable(), file=sys.stderr)\n"
    )
    log = tmp_path / "log"
    with open(log, "wb") as file:
        subprocess.run(
            command("--no-prefix", program), stdout=file, stderr=subprocess.STDOUT, check=True
        )

    assert sorted(log.read_bytes().splitlines()) == [
        b"err False False",
        b"out <stdout> w True",
    ]


def test_our_stdout_stays_blocking_for_its_other_users(fake_torch: object) -> None:
    """O_NONBLOCK is never set on a descriptor shared with the shell."""
    read, write = os.pipe()
    process = subprocess.Popen(command(PROGRAMS / "echo.py"), stdout=write)
    process.wait(timeout=60)

    assert os.get_blocking(write)
    os.close(write)
    os.close(read)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_slow_reader_of_a_non_blocking_pipe_loses_nothing(stream: str) -> None:
    """ssh, for one, leaves its terminal in that state, for every process that uses it."""
    words = {
        "stdout": ["--dry-run", "--all", "--format", "json", "--mesh", "2048", "x.py"],
        "stderr": ["--help", "x" * 100_000],
    }[stream]
    whole = subprocess.run(command(*words), capture_output=True, check=False)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(reader, True)
    other = "stderr" if stream == "stdout" else "stdout"
    # The writer's end stays open here, to see that the pipe is full.
    with subprocess.Popen(
        command(*words), **{stream: writer, other: subprocess.DEVNULL}
    ) as process:
        wait_until(lambda: not select.select([], [writer], [], 0)[1], lambda: "a full pipe")
        os.close(writer)
        with open(reader, "rb") as file:
            printed = file.read()

    assert process.returncode == whole.returncode
    assert printed == getattr(whole, stream)


def test_closed_streams_do_no_harm(fake_torch: object, tmp_path: Path) -> None:
    """``>&- 2>&-`` runs the launch without output."""
    program = tmp_path / "touch.py"
    program.write_text(f"print('x'); open(r'{tmp_path}/ran', 'w').close()")
    script = 'MESHRUN_STEP=left "$@" <&- >&- 2>&-'
    result = subprocess.run(["sh", "-c", script, "sh", *command(program)], check=False)

    assert result.returncode == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["--dry-run", PROGRAMS / "echo.py"]])
def test_information_for_a_closed_stream_is_no_error(words: list[str | Path]) -> None:
    """As under ``python --version >&-``."""
    ours = run_meshrun(*words, around=["sh", "-c", '"$@" >&-', "sh"])

    assert (ours.returncode, ours.stderr) == (0, "")


@pytest.mark.parametrize("method", ["fork", "exec"])
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_not_replaced_by_another(
    closed: int, method: str, fake_torch: object
) -> None:
    """A rank's stderr does not go to stdout, and its stdin is not one of meshrun's pipes."""
    script = f'"$@" {"<&-" if closed == 0 else f"{closed}>&-"}'
    words = command("--start-method", method, PROGRAMS / "streams.py")
    ran = subprocess.run(
        ["sh", "-c", script, "sh", *words], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0
    assert ran.stdout == ("" if closed == 1 else "[rank 0] out, read ''\n")
    assert ran.stderr == ("" if closed == 2 else "[rank 0] err\n")


def test_a_terminal_shows_the_start_and_one_bar(fake_torch: object, tmp_path: Path) -> None:
    """It shows the progress of the start, keeps a bar on one line, and respects NO_COLOR."""
    program = tmp_path / "bar.py"
    program.write_text(
        "import sys\nfor n in range(3):\n    sys.stdout.write(f'\\r{n}%')\nprint('\\nall done')\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("--nproc-per-node", "1", program),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "NO_COLOR": "1", "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the terminal's other end was closed: EIO
        pass
    os.close(ours)

    assert process.wait(timeout=60) == 0
    assert b"meshrun: importing torch" in shown
    assert b"mesh (" not in shown, "this launch has no mesh"
    lines = shown.replace(b"\r\n", b"\n").split(b"\n")
    assert lines[-2].endswith(b"[rank 0] all done")
    assert any(line.endswith(b"[rank 0] 2%") for line in lines)
    assert b"\x1b[3" not in shown


def test_a_panel_is_drawn_below_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are shown while a launch with --status starts."""
    monkeypatch.setenv("TERM", "xterm")
    screen = pyte.Screen(60, 10)
    ours, theirs = pty.openpty()
    console = Console(theirs, theirs)
    shown = []
    for show in (
        lambda: console.set_status("importing torch"),
        lambda: console.set_panel(["-- 2 starting --"]),
        lambda: console.note("a line"),
        console.show_waiting,
    ):
        show()
        pyte.ByteStream(screen).feed(os.read(ours, 1 << 16))
        shown.append([line.rstrip() for line in screen.display if line.strip()])
    os.close(theirs)
    os.close(ours)

    below = ["meshrun: importing torch", "-- 2 starting --"]
    assert shown == [below[:1], below, ["meshrun: a line"], ["meshrun: a line", *below]]


BACKGROUND = """import os, sys, time
from meshrun.console.console import Console
if sys.argv.pop() == "child":
    if child := os.fork():
        sys.exit(os.waitpid(child, 0)[1])
    os.setsid()
console = Console()
for number, name in enumerate(sys.argv[1:]):
    console.set_status(f"at work {number}")
    console.set_panel([f"-- part {number} --"])
    console.note(f"line {number}")
    console.show_waiting()
    os.mkfifo(name)
    open(name).close()
console.close()
"""


@pytest.mark.parametrize("way", ["job", "child"])
def test_in_the_background_the_typed_line_stays(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn or cleared while the shell has the terminal; ``fg`` redraws everything."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "console.py"
    program.write_text(BACKGROUND)
    parts = [Path("a"), Path("b"), Path("c")]
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], {"PS1": "now:"}, 300, 20)
    try:
        line = shlex.join([sys.executable, str(program), *map(str, parts), way])
        terminal.wait_for("now:")
        terminal.type(f"{line} &\n")
        terminal.wait_for("meshrun: line 0")
        terminal.type("fg # typed")
        terminal.wait_for("fg # typed")
        wait_until(parts[0].exists, lambda: str(terminal.shown))
        parts[0].write_text("")
        wait_until(parts[1].exists, lambda: str(terminal.shown))
        terminal.wait_for("meshrun: line 1")
        assert "at work" not in str(terminal.all_lines)
        assert "-- part" not in str(terminal.all_lines)
        assert any("fg # typed" in line for line in terminal.shown)
        terminal.type("\n")
        terminal.wait_for(line, 2)
        wait_until(lambda: terminal.foreground != terminal.process.pid, lambda: "the job")
        parts[1].write_text("")
        terminal.wait_for("-- part 2 --")
        terminal.wait_for("meshrun: at work 2")
        parts[2].write_text("")
        terminal.wait_for("now:", 3)
        assert "at work" not in str(terminal.all_lines)
        terminal.type("exit\n")
        terminal.wait()
    finally:
        terminal.end()


def test_the_status_line_is_cleared_when_another_process_prints_our_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with ``| tee log``, whose lines would continue after the status."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    console = Console(write, theirs, host="b")
    console.set_status("started 1 of 2 ranks")
    os.read(ours, 1 << 16)
    console.print_line(b"a line", to_stderr=False)
    cleared = os.read(ours, 1 << 16)
    console.set_status("started 2 of 2 ranks")
    console.note("a note")
    noted = os.read(ours, 1 << 16)
    line = os.read(read, 1 << 16)
    for fd in (ours, theirs, read, write):
        os.close(fd)

    assert (cleared, noted, line) == (b"\r\x1b[2K", b"meshrun: b: a note\r\n", b"a line\n")


def test_bars_of_several_ranks_do_not_fill_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One bar is written at a time, another one after 10 s, and the last line of each."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic_ns=lambda: int(now_s * 1e9))
    monkeypatch.setattr("meshrun.console.console.time", clock)
    write = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
    console = Console(write, write)
    bars = [console.stream(rank=rank, prefix=b"%d " % rank, to_stderr=True) for rank in (0, 1)]
    for step in range(1, 5):
        for bar in bars:
            console.feed(bar, b"\r%d" % step)
    now_s += 11
    for bar in bars:
        console.feed(bar, b"\r5")
    for bar in bars:
        console.feed(bar, b"\rdone\n")
    os.close(write)
    output = (tmp_path / "output").read_bytes()

    assert output.replace(b"\r", b"~").splitlines() == [
        b"0 1~", b"1 1~", b"0 2~0 3~0 4~", b"1 4~", b"0 5~0 done", b"1 5~1 done",
    ]  # fmt: skip


def test_a_prompt_is_not_hidden_by_the_progress_of_another_rank(
    fake_torch: object, tmp_path: Path
) -> None:
    """Nor is the text typed there; once it is answered, the bar returns."""
    program, go = tmp_path / "ask.py", tmp_path / "go"
    program.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "    print('hello', input('your name? '), end=' ', flush=True)\n"
        "    while not os.path.exists(sys.argv[1] + '1'): time.sleep(0.01)\n"
        "for step in range(10**6):\n"
        "    sys.stderr.write(f'\\rstep {step} of many'); sys.stderr.flush()\n"
        "    if os.path.exists(sys.argv[1] + '1'): break\n"
        "    time.sleep(0.005)\n"
        "print(file=sys.stderr)\n"
    )
    with open_terminal("--nproc-per-node", "2", program, go) as terminal:
        terminal.wait_for("of many")
        go.touch()
        terminal.wait_for("[rank 0] your name?")
        terminal.type("Ada")
        terminal.wait_for("[rank 0] your name? Ada")
        assert "of many" not in str(terminal.shown)
        terminal.type("\n")
        wait_until(lambda: "of many" in str(terminal.shown), lambda: str(terminal.shown))
        Path(f"{go}1").touch()
        code = terminal.wait()

    assert code == 0
    assert "[rank 0] hello Ada" in terminal.all_lines


def test_a_prompt_is_shown_even_if_the_output_goes_to_a_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with ``| tee log``, where the user types on the terminal; other beginnings wait."""
    times = iter(range(0, 10**12, 10**9))
    clock = SimpleNamespace(monotonic_ns=lambda: next(times))
    monkeypatch.setattr("meshrun.console.console.time", clock)
    monkeypatch.setattr("termios.tcgetattr", lambda _: [0, 0, 0, termios.ECHO])
    write = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
    console = Console(write, write)
    stream = console.stream(rank=0, prefix=b"0 ", to_stderr=False, may_prompt=True)
    console.feed(stream, b"loading")
    console.show_waiting()
    console.feed(stream, b" done\nname? ")
    console.is_read = lambda: True
    console.show_waiting()
    console.feed(stream, b"hi Ada\n")
    os.close(write)

    lines = (tmp_path / "output").read_bytes().splitlines()
    assert lines == [b"0 loading done", b"0 name? ", b"0 hi Ada"]


@pytest.mark.parametrize("moves_cursor", [True, False])
@pytest.mark.parametrize("read_s", [0.2, 5], ids=["soon", "late"])
def test_a_prompt_is_known_once_it_is_read(
    moves_cursor: bool, read_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may write its prompt long before it reads; one that reads soon is waited for."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic_ns=lambda: int(now_s * 1e9))
    monkeypatch.setattr("meshrun.console.console.time", clock)
    monkeypatch.setattr("termios.tcgetattr", lambda _: [0, 0, 0, termios.ECHO])
    monkeypatch.setenv("TERM", "xterm" if moves_cursor else "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = pty.openpty()
    console = Console(theirs, theirs)
    stream = console.stream(rank=0, prefix=b"0 ", to_stderr=False, may_prompt=True)
    console.feed(stream, b"name? ")
    shown_s: list[float] = []
    asked_s = now_s
    while (wake_ns := console.next_wake_ns) is not None:
        now_s = wake_ns / 1e9
        console.is_read = [lambda: False, lambda: True][now_s >= asked_s + read_s]
        console.show_waiting()
        if not shown_s and select.select([ours], [], [], 0)[0]:
            shown_s.append(now_s - asked_s)
    console.is_read = lambda: False
    console.feed(stream, b"hi Ada\n")
    os.close(theirs)
    written = b""
    while b"0 hi Ada" not in written:  # a terminal may pass on what was written in parts
        written += os.read(ours, 1 << 16)
    os.close(ours)

    assert shown_s == [pytest.approx(min(read_s, 0.5), abs=0.05)]
    assert written.count(b"name? ") == 1


def test_ranks_know_the_width_of_their_lines(fake_torch: object, tmp_path: Path) -> None:
    """The terminal's width less the prefix, unless the user sets COLUMNS."""
    program = tmp_path / "wide.py"
    program.write_text("import shutil; print('-' * shutil.get_terminal_size().columns)\n")
    with open_terminal(program) as terminal:
        assert terminal.wait() == 0
        lines = [line for line in terminal.all_lines if "-" in line]
    with open_terminal(program, env={"COLUMNS": "30"}) as terminal:
        assert terminal.wait() == 0
        asked = [line for line in terminal.all_lines if "-" in line]

    assert lines == ["[rank 0] " + "-" * (terminal.screen.columns - len("[rank 0] "))]
    assert asked == ["[rank 0] " + "-" * 30]


def test_a_dumb_terminal_shows_a_prompt(fake_torch: object, tmp_path: Path) -> None:
    """Without escape sequences; what follows it is a line of its own, as Enter has ended it."""
    program = tmp_path / "ask.py"
    program.write_text("print('hello', input('your name? '))\n")
    with open_terminal(program, env={"TERM": "dumb"}) as terminal:
        terminal.wait_for("[rank 0] your name?")
        terminal.type("Ada\n")
        code = terminal.wait()

    assert code == 0
    assert terminal.all_lines[-2:] == ["[rank 0] your name? Ada", "[rank 0] hello Ada"]
    assert b"\x1b" not in terminal.raw


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_an_error_is_colored_on_a_terminal(env: dict[str, str]) -> None:
    """Only ``error:`` and ``hint:`` are, unless TERM or NO_COLOR rules it out."""
    with open_terminal("--help", "lgos", env=env) as terminal:
        assert terminal.wait() == 2
        printed = terminal.raw.replace(b"\r\n", b"\n")

    error, hint = (
        (b"error:", b"hint:") if env else (b"\33[1;31merror:\33[0m", b"\33[1;36mhint:\33[0m")
    )
    assert (
        printed
        == error + b" no help topic or option `lgos`\n\n" + hint + b" did you mean `logs`?\n"
    )


@pytest.mark.parametrize(
    ("words", "stream", "code", "said"),
    [
        (["--nproc-per-node", "2", PROGRAMS / "print_much.py", "3"], "stdout", 0,
         "meshrun: cannot write to stdout ({});"
         " what ranks print there is lost\n"),
        (["--nproc-per-node", "2", PROGRAMS / "end.py", "7"], "stderr", 7, None),
        *((words, "stdout", 71, "error: cannot write the output: {}\n")
          for words in (["--version"], ["--help"], ["--dry-run", "--mesh", "2", "x.py"])),
    ],
)  # fmt: skip
def test_a_full_disk_costs_only_what_is_printed(
    words: list[str | Path], stream: str, code: int, said: str | None, fake_torch: object
) -> None:
    """No launch ends for it; what only prints ends with the code for a problem of the machine.

    So does a stream that is not open for writing (``1< file``).
    """
    for path, mode, why in (("/dev/full", "w", "No space left on device"),
                            (__file__, "r", "Bad file descriptor")):  # fmt: skip
        with open(path, mode) as full:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
            result = subprocess.run(command(*words), text=True, check=False, **streams)

        assert (result.returncode, result.stderr) == (code, said and said.format(why))


def test_an_error_shows_what_it_found_without_control_characters() -> None:
    """A value may come from a file or name that somebody else chose."""
    ran = run_meshrun("--hosts", "a\x1b]0;b\x07", "x.py")

    assert ran.returncode == 2
    assert ran.stderr.startswith(r"error: --hosts: `a\x1b]0;b\x07` is not a host" + "\n\nhint: ")


@pytest.mark.parametrize(
    ("both", "limit_s"),
    [
        (False, 0),
        pytest.param(True, 0, marks=pytest.mark.nightly),
        pytest.param(False, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_stopped_reader_does_not_keep_a_stopped_launch_alive(
    both: bool, limit_s: int, fake_torch: object
) -> None:
    """One SIGTERM is enough; stderr, if it is read, says how much output was dropped.

    Ranks that wait for the reader do not hang.
    """
    reader, writer = os.pipe()
    with subprocess.Popen(
        command(
            *("--nproc-per-node", "2", "--shutdown-timeout", "1", "--hang-timeout", str(limit_s)),
            *(PROGRAMS / "print_much.py", "100000000"),
        ),
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
    ) as process:
        wait_until(lambda: is_full(writer), lambda: "a full pipe")
        let_pass(2 * limit_s)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
    os.close(reader)
    os.close(writer)

    assert process.returncode == -signal.SIGTERM
    if not both:
        assert re.search(r"\nmeshrun: dropped [1-9][0-9,]* bytes of output", stderr.decode())
        assert stderr.endswith(b"meshrun: stopped by SIGTERM\n")
        assert b"no rank has made progress" not in stderr
