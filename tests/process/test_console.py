"""Ranks' output on our stdout and stderr."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyte
import pytest

from meshrun.console.console import Console
from tests.kit import PROGRAMS, command, is_full, lines_of, run_meshrun, wait_until, within
from tests.terminal import Terminal, open_terminal


def test_each_stream_keeps_its_place(fake_torch: object) -> None:
    """stdout to stdout, stderr to stderr, each line with its rank."""
    ours = run_meshrun("--nproc-per-node", "3", PROGRAMS / "echo.py")

    assert sorted(ours.stdout.splitlines()) == [f"[rank {rank}] out {rank}" for rank in range(3)]
    assert sorted(ours.stderr.splitlines()) == [f"[rank {rank}] err {rank}" for rank in range(3)]


def test_without_prefix_lines_are_as_they_were(fake_torch: object) -> None:
    """--no-prefix changes nothing in a line."""
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", PROGRAMS / "echo.py")

    assert sorted(ours.stdout.splitlines()) == ["out 0", "out 1"]


@pytest.mark.parametrize("more", [[], ["--no-prefix"]])
def test_what_all_say_before_they_fail_is_printed_once(
    fake_torch: object, tmp_path: Path, more: list[str]
) -> None:
    """As where an argument is missing; nor does the report repeat it."""
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


def test_what_ranks_that_go_on_say_alike_is_all_there(fake_torch: object, tmp_path: Path) -> None:
    """A warning of every rank stands before what the rank says next, or its end."""
    program = tmp_path / "warn.py"
    program.write_text(
        "import os, sys\nprint('careful', file=sys.stderr, flush=True)\n"
        "if os.environ['RANK'] < '2': print('on', file=sys.stderr)\n"
    )
    said = run_meshrun("--nproc-per-node", "4", program).stderr.splitlines()

    for rank in range(4):
        mine = [line for line in said if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] careful", f"[rank {rank}] on"][: 2 if rank < 2 else 1]


def test_halves_of_lines_find_each_other(fake_torch: object) -> None:
    """Lines written in two halves by four ranks at once come out whole."""
    ours = run_meshrun("--nproc-per-node", "4", PROGRAMS / "half_lines.py")
    labels = [f"rank {rank}" for rank in range(4)]

    for rank, lines in enumerate(lines_of(ours.stdout, labels).values()):
        assert lines == [f"first-{n}-{rank} second-{n}-{rank}" for n in range(30)]


def test_odd_bytes_and_bars_come_through(fake_torch: object) -> None:
    """Bars keep their states, bad UTF-8 its bytes, and a last line gets its end."""
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
    """Two ranks print 8 MB into a pipe that is read late and slowly: every line arrives."""
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


def test_a_reader_that_goes_away_ends_the_launch(fake_torch: object) -> None:
    """``meshrun ... | head`` ends with SIGPIPE, as any program in a pipe."""
    with subprocess.Popen(
        command("--nproc-per-node", "2", PROGRAMS / "print_much.py", "100000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == -13


def test_a_reader_that_is_gone_ends_the_help() -> None:
    """``meshrun --help | true`` ends with SIGPIPE too."""
    gone, pipe = os.pipe()
    os.close(gone)
    ours = subprocess.run(command("--help"), stdout=pipe, stderr=subprocess.PIPE, check=False)
    os.close(pipe)

    assert (ours.returncode, ours.stderr) == (-13, b"")


def test_a_reader_that_is_gone_ends_the_help_in_a_container() -> None:
    """The kernel ignores a signal that PID 1 sends itself, so the exit code says it."""
    around = within("--user", "--map-root-user", "--pid", "--fork", prepare=":")
    gone, pipe = os.pipe()
    os.close(gone)
    words = [*around, *command("--version")]
    ours = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, check=False)
    os.close(pipe)

    assert (ours.returncode, ours.stderr) == (128 + signal.SIGPIPE, b"")


def test_stdout_and_stderr_may_be_one_file(fake_torch: object, tmp_path: Path) -> None:
    """``> log 2>&1`` keeps lines whole and the file's offset shared with the shell."""
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


def test_our_stdout_stays_blocking_for_its_other_users(fake_torch: object) -> None:
    """The flag O_NONBLOCK is never set on a descriptor that we share with the shell."""
    read, write = os.pipe()
    process = subprocess.Popen(command(PROGRAMS / "echo.py"), stdout=write)
    process.wait(timeout=60)

    assert os.get_blocking(write)
    os.close(write)
    os.close(read)


def test_closed_streams_do_no_harm(fake_torch: object, tmp_path: Path) -> None:
    """``>&- 2>&-`` is a launch that nobody hears."""
    program = tmp_path / "touch.py"
    program.write_text(f"print('x'); open(r'{tmp_path}/ran', 'w').close()")
    script = '"$@" <&- >&- 2>&-'
    result = subprocess.run(["sh", "-c", script, "sh", *command(program)], check=False)

    assert result.returncode == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", ["fork", "exec"])
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_no_other(closed: int, method: str, fake_torch: object) -> None:
    """What a rank writes to stderr does not go to stdout, and it reads no pipe of ours."""
    script = f'"$@" {"<&-" if closed == 0 else f"{closed}>&-"}'
    words = command("--start-method", method, PROGRAMS / "streams.py")
    ran = subprocess.run(
        ["sh", "-c", script, "sh", *words], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0
    assert ran.stdout == ("" if closed == 1 else "[rank 0] out, read ''\n")
    assert ran.stderr == ("" if closed == 2 else "[rank 0] err\n")


def test_a_full_disk_is_told_and_does_not_end_the_launch(fake_torch: object) -> None:
    """What cannot be written is lost, and one line says so."""
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            command("--nproc-per-node", "2", PROGRAMS / "print_much.py", "3"),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )

    assert result.returncode == 0
    assert result.stderr == (
        b"meshrun: cannot write to stdout (No space left on device);"
        b" what ranks print there is lost\n"
    )


def test_a_terminal_shows_the_start_and_one_bar(fake_torch: object, tmp_path: Path) -> None:
    """A start is followed, a bar stays on one line, and colors can be switched off."""
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
    assert b"mesh (" not in shown, "there is none"
    lines = shown.replace(b"\r\n", b"\n").split(b"\n")
    assert lines[-2].endswith(b"[rank 0] all done")
    assert any(line.endswith(b"[rank 0] 2%") for line in lines)
    assert b"\x1b[3" not in shown


def test_a_panel_takes_the_place_of_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are there while a launch with --status starts."""
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
def test_in_the_background_the_line_that_is_typed_stays(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn nor cleared where the shell prints, and all is there again after ``fg``."""
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


def test_the_status_line_ends_where_another_prints_our_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in ``| tee log``, whose lines would go on where the status ends."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    console = Console(write, theirs)
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

    assert (cleared, noted, line) == (b"\r\x1b[2K", b"meshrun: a note\r\n", b"a line\n")


def test_bars_of_several_ranks_do_not_fill_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One goes on; another takes its place every 10 s, and each has its last line."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic_ns=lambda: int(now_s * 1e9))
    monkeypatch.setattr("meshrun.console.console.time", clock)
    write = os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT)
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
    said = (tmp_path / "said").read_bytes()

    assert said.replace(b"\r", b"~").splitlines() == [
        b"0 1~", b"1 1~", b"0 2~0 3~0 4~", b"1 4~", b"0 5~0 done", b"1 5~1 done",
    ]  # fmt: skip


def test_a_prompt_is_not_hidden_by_the_progress_of_another_rank(
    fake_torch: object, tmp_path: Path
) -> None:
    """Nor is what somebody types there; once it is answered, the bar is there again."""
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
    assert "[rank 0] your name? hello Ada" in terminal.all_lines


def test_ranks_know_how_wide_their_lines_may_be(fake_torch: object, tmp_path: Path) -> None:
    """What the prefix leaves of the terminal; a width that the user sets holds."""
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
    """Without one escape sequence; the line is there again once it is whole."""
    program = tmp_path / "ask.py"
    program.write_text("print('hello', input('your name? '))\n")
    with open_terminal(program, env={"TERM": "dumb"}) as terminal:
        terminal.wait_for("[rank 0] your name?")
        terminal.type("Ada\n")
        code = terminal.wait()

    assert code == 0
    assert "[rank 0] your name? hello Ada" in terminal.all_lines
    assert b"\x1b" not in terminal.raw


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_an_error_is_colored_on_a_terminal(env: dict[str, str]) -> None:
    """Its first words alone, unless the terminal or the user says otherwise."""
    with open_terminal("--help", "lgos", env=env) as terminal:
        assert terminal.wait() == 2
        told = terminal.raw.replace(b"\r\n", b"\n")

    error, hint = (
        (b"error:", b"hint:") if env else (b"\33[1;31merror:\33[0m", b"\33[1;36mhint:\33[0m")
    )
    assert (
        told == error + b" no help topic or option `lgos`\n\n" + hint + b" did you mean `logs`?\n"
    )


@pytest.mark.parametrize("asked", [["--version"], ["--help"], ["--dry-run", "--mesh", "2", "x.py"]])
def test_a_full_disk_below_stdout_is_no_bug(asked: list[str]) -> None:
    """What cannot be written is said in one line, with the code of a machine that lacks room."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command(*asked), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )

    assert result.returncode == 71
    assert result.stderr == "error: cannot write the output: No space left on device\n"


def test_an_error_shows_what_it_found_without_control_characters() -> None:
    """A value may come from a file or a name that somebody else wrote."""
    ran = run_meshrun("--hosts", "a\x1b]0;b\x07", "x.py")

    assert ran.returncode == 2
    assert ran.stderr.startswith(r"error: --hosts: `a\x1b]0;b\x07` is not a host" + "\n\nhint: ")


def test_a_full_disk_below_stderr_changes_no_exit_code(fake_torch: object) -> None:
    """The story of a failure is lost there, and nothing else."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command("--nproc-per-node", "2", PROGRAMS / "end.py", "7"),
            stdout=subprocess.PIPE,
            stderr=full,
            check=False,
        )

    assert result.returncode == 7


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_reader_that_is_stopped_does_not_keep_a_launch_that_is(
    both: bool, fake_torch: object
) -> None:
    """One SIGTERM is enough, and what was dropped is said where somebody reads."""
    reader, writer = os.pipe()
    with subprocess.Popen(
        command(
            *("--nproc-per-node", "2", "--shutdown-timeout", "1"),
            *(PROGRAMS / "print_much.py", "100000000"),
        ),
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
    ) as process:
        wait_until(lambda: is_full(writer), lambda: "a full pipe")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    os.close(reader)
    os.close(writer)

    assert process.returncode == -signal.SIGTERM
    if not both:
        told = r"\nmeshrun: dropped [1-9][0-9,]* bytes of output"
        assert re.search(told, said.decode())
        assert said.endswith(b"meshrun: stopped by SIGTERM\n")
