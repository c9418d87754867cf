"""Where ranks' output goes: files in torchrun's layout, and the console."""

import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from tests.kit import PROGRAMS, run_meshrun, start_meshrun

ECHO = PROGRAMS / "echo.py"


def files_below(folder: Path) -> list[str]:
    """Return the files of the only run in ``folder``, as paths relative to the run."""
    (run,) = folder.iterdir()
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def text_of(folder: Path, name: str) -> str:
    (run,) = folder.iterdir()
    return (run / name).read_text()


def test_redirected_streams_go_only_to_files(fake_torch: object, tmp_path: Path) -> None:
    """-r 3 prints nothing."""
    ours = run_meshrun("--nproc-per-node", "2", "-r", "3", "--log-dir", tmp_path / "logs", ECHO)

    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "", "")
    assert files_below(tmp_path / "logs") == [
        f"attempt_0/{rank}/{name}.log" for rank in (0, 1) for name in ("stderr", "stdout")
    ]
    assert text_of(tmp_path / "logs", "attempt_0/1/stderr.log") == "err 1\n"


def test_a_log_dir_over_a_link_is_the_one_that_the_system_means(
    fake_torch: object, tmp_path: Path
) -> None:
    """`link/..` is the folder above the link's target."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    ours = run_meshrun("-r", "3", "--log-dir", "link/../logs", ECHO, cwd=tmp_path)

    assert ours.returncode == 0, ours.stderr
    assert not (tmp_path / "logs").exists()
    assert text_of(tmp_path / "far" / "logs", "attempt_0/0/stdout.log") == "out 0\n"


def test_teed_streams_go_to_both(fake_torch: object, tmp_path: Path) -> None:
    """-t selects local ranks and streams; the rest is only printed."""
    ours = run_meshrun(
        "--nproc-per-node", "2", "-t", "0:1,1:2", "--log-dir", tmp_path / "logs", ECHO
    )

    assert sorted(ours.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(ours.stderr.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
    assert files_below(tmp_path / "logs") == ["attempt_0/0/stdout.log", "attempt_0/1/stderr.log"]


def test_torchruns_prefixes(fake_torch: object, tmp_path: Path) -> None:
    """None, ``[default0]:`` if teed, and ``[rank1]:`` in tracebacks, in files too."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "print('out', flush=True)\n"
        "print('err', os.environ['RANK'], file=sys.stderr, flush=True)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists(f'{sys.argv[0]}.0'): time.sleep(0.01)\n"
        "    os.environ['NOT_SET']\n"
        "open(f'{sys.argv[0]}.0', 'x').close()\n"
    )
    ours = run_meshrun(
        "--nproc-per-node", "2", "--prefix", "torchrun", "-t", "0:1,1:2",
        "--log-dir", tmp_path / "logs", program,
    )  # fmt: skip
    logged = text_of(tmp_path / "logs", "attempt_0/1/stderr.log").splitlines()

    assert sorted(ours.stdout.splitlines()) == ["[default0]:out", "out"]
    shown = {*ours.stderr.splitlines()}
    assert {"err 0", "[default1]:err 1", "[rank1]: KeyError: 'NOT_SET'"} <= shown
    assert logged[:2] == ["err 1", "[rank1]: Traceback (most recent call last):"]
    assert logged[-1] == "[rank1]: KeyError: 'NOT_SET'"
    assert f"       {program.name}:6 in <module>, on " in ours.stderr.replace(f"{tmp_path}/", "")


def test_ranges_of_ranks_may_have_several_digits(fake_torch: object, tmp_path: Path) -> None:
    """torchrun reads ranks of one digit only."""
    run_meshrun("--nproc-per-node", "12", "-r", "0-1:1,10-11:1", "--log-dir", tmp_path / "l", ECHO)

    assert files_below(tmp_path / "l") == [
        f"attempt_0/{rank}/stdout.log" for rank in (0, 1, 10, 11)
    ]


def test_a_temporary_folder_is_removed_after_success(fake_torch: object, tmp_path: Path) -> None:
    """Without --log-dir."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run_meshrun("-t", "3", ECHO, env={"TMPDIR": str(temporary)})

    assert list(temporary.iterdir()) == []


def test_a_temporary_folder_is_kept_and_named_after_a_failure(
    fake_torch: object, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ours = run_meshrun(
        "--nproc-per-node", "2", "-r", "1", PROGRAMS / "end.py", "raise",
        env={"TMPDIR": str(temporary)},
    )  # fmt: skip
    (run,) = temporary.iterdir()

    assert f"logs are in {run}" in ours.stderr
    assert (run / "attempt_0" / "0" / "stdout.log").exists()


def test_dev_null_means_no_files(fake_torch: object) -> None:
    """As for torchrun: streams are printed, and TORCHELASTIC_ERROR_FILE is empty."""
    ours = run_meshrun(
        "--log-dir", "/dev/null", "-t", "3", "--no-prefix", PROGRAMS / "environment.py"
    )

    assert '"TORCHELASTIC_ERROR_FILE": ""' in ours.stdout


def test_error_files_hold_the_exception(fake_torch: object, tmp_path: Path) -> None:
    """Even if the program does not use @record."""
    run_meshrun(
        "--nproc-per-node", "2", "--log-dir", tmp_path / "logs", PROGRAMS / "end.py", "raise"
    )

    assert "ValueError: the loss is nan" in text_of(tmp_path / "logs", "attempt_0/1/error.json")


def test_an_error_file_keeps_what_failed_in_a_launch_below(
    fake_torch: object, tmp_path: Path
) -> None:
    """@record leaves the error of the rank there, not the box that the program raises."""
    program, logs = tmp_path / "program.py", tmp_path / "logs"
    program.write_text(
        "import json, os\n"
        "class ChildFailedError(Exception): ...\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    json.dump({'message': {'message': 'ValueError: below', 'errorCode': 5}}, file)\n"
        "raise ChildFailedError('\\n=====\\ntrain.py FAILED\\n-----\\n')\n"
    )
    ours = run_meshrun("--log-dir", logs, program)

    record = json.loads(text_of(logs, "attempt_0/0/error.json"))
    assert record == {"message": {"message": "ValueError: below", "errorCode": 5}}
    assert "error: rank 0 raised ChildFailedError: train.py FAILED, exit code 1" in ours.stderr


@pytest.mark.parametrize("kept", ["-r", "-t"])
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_log_ends_with_the_exception(
    kept: str, restarts: str, fake_torch: object, tmp_path: Path
) -> None:
    """Python writes it to stderr; the console still shows it only once."""
    words = ("--nproc-per-node", "2", "--max-restarts", restarts, "--log-dir", tmp_path / "logs")
    ours = run_meshrun(*words, kept, "2", PROGRAMS / "end.py", "raise")

    for attempt in range(int(restarts) + 1):
        log = text_of(tmp_path / "logs", f"attempt_{attempt}/1/stderr.log")
        assert log.startswith("Traceback (most recent call last):\n")
        assert log.endswith("\nValueError: the loss is nan\n")
        assert text_of(tmp_path / "logs", f"attempt_{attempt}/0/stderr.log") == ""
    assert ours.stderr.count("Traceback") == int(restarts) + 1


def test_a_log_that_its_rank_truncates_is_still_followed(
    fake_torch: object, tmp_path: Path
) -> None:
    """``open("/dev/stdout", "w")`` truncates it, and so do programs that rotate logs."""
    program, go_on = tmp_path / "program.py", tmp_path / "go_on"
    program.write_text(
        "import os, time\n"
        "print('before', flush=True)\n"
        f"while not os.path.exists({str(go_on)!r}):\n    time.sleep(0.01)\n"
        "os.ftruncate(1, 0)\n"
        "print('then', flush=True)\n"
    )
    words = ("--nproc-per-node", "1", "-t", "1", "--log-dir", tmp_path / "logs", program)
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("before")
        go_on.touch()

        assert running.wait() == 0
    assert running.stdout == "[rank 0] before\n[rank 0] then\n"
    assert text_of(tmp_path / "logs", "attempt_0/0/stdout.log") == "then\n"


@pytest.mark.parametrize("kept", ["-r", "-t"])
@pytest.mark.parametrize("end", ["raise SystemExit(1)", "raise ValueError('the loss is nan')"])
def test_a_log_that_its_rank_replaces_by_a_pipe_blocks_nothing(
    end: str, kept: str, fake_torch: object, tmp_path: Path
) -> None:
    """Opening a pipe waits for the other end, which nobody opens."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "log = os.path.join(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']), 'stderr.log')\n"
        f"os.unlink(log)\nos.mkfifo(log)\n{end}\n"
    )
    ours = run_meshrun("--nproc-per-node", "1", kept, "2", "--log-dir", tmp_path / "logs", program)

    assert ours.returncode == 1
    assert "\nerror: rank 0 " in f"\n{ours.stderr}"


def test_matching_lines_are_copied(fake_torch: object, tmp_path: Path) -> None:
    """Teed lines that contain one of the words are copied with torchrun's prefix."""
    run_meshrun(
        "--nproc-per-node", "2", "-t", "0:2,1:3", "--role", "trainer",
        "--log-dir", tmp_path / "logs",
        "--duplicate-stdout-filters", "out,nothing", "--duplicate-stderr-filters", "err", ECHO,
    )  # fmt: skip

    copied = text_of(tmp_path / "logs", "attempt_0/filtered_stdout.log")
    assert copied == "[trainer1]:out 1\n"
    errors = text_of(tmp_path / "logs", "attempt_0/filtered_stderr.log")
    assert sorted(errors.splitlines()) == ["[trainer0]:err 0", "[trainer1]:err 1"]


def test_files_of_matching_lines_exist_without_any(fake_torch: object, tmp_path: Path) -> None:
    """As with torchrun, which copies no lines of ranks that are not shown."""
    run_meshrun(
        "-t", "3", "--log-dir", tmp_path / "logs", "--local-ranks-filter", "5",
        "--duplicate-stdout-filters", "out", "--duplicate-stderr-filters", "err", ECHO,
    )  # fmt: skip

    assert text_of(tmp_path / "logs", "attempt_0/filtered_stdout.log") == ""
    assert text_of(tmp_path / "logs", "attempt_0/filtered_stderr.log") == ""


@pytest.mark.parametrize("files", [[], ["-t", "3"]])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--show", "rank=1"], ["1"]),
        (["--hide", "rank=0,2"], ["1"]),
        (["--show", "rank=0-1", "--hide", "local_rank=0"], ["1"]),
        (["--local-ranks-filter", "0,2"], ["0", "2"]),
    ],
)
def test_the_console_shows_chosen_ranks(
    options: list[str], expected: list[str], files: list[str], fake_torch: object, tmp_path: Path
) -> None:
    """Files keep the output of all ranks."""
    logs = ["--log-dir", str(tmp_path / "logs")] if files else []
    ours = run_meshrun("--nproc-per-node", "3", *options, *files, *logs, ECHO)

    assert sorted(ours.stdout.splitlines()) == [f"[rank {rank}] out {rank}" for rank in expected]
    assert sorted(ours.stderr.splitlines()) == [f"[rank {rank}] err {rank}" for rank in expected]
    if files:
        for rank in range(3):
            name = f"attempt_0/{rank}/stdout.log"
            assert text_of(tmp_path / "logs", name) == f"out {rank}\n"


def test_equal_lines_are_printed_once(fake_torch: object) -> None:
    """--collapse adds their number."""
    ours = run_meshrun("--nproc-per-node", "4", "--collapse", PROGRAMS / "alike.py")

    lines = ours.stdout.splitlines()
    assert lines[0] == "[all x4] begin"
    assert lines[-1] == "[all x4] end"
    assert sorted(lines[1:-1]) == [f"[rank {rank}] I am {rank}" for rank in range(4)]


def test_a_flood_of_equal_lines_is_printed_once(fake_torch: object, tmp_path: Path) -> None:
    """Lines of ranks that are ahead are held back; no line is lost or out of order."""
    program = tmp_path / "flood.py"
    program.write_text("for step in range(20_000): print('step', step)\n")
    ours = run_meshrun("--nproc-per-node", "4", "--collapse", program)
    lines = [line.rpartition("] step ") for line in ours.stdout.splitlines()]

    assert sum(int(label.rpartition(" x")[2]) if " x" in label else 1 for label, *_ in lines) == (
        4 * 20_000
    )
    assert len(lines) < 30_000  # a busy machine may hold up a rank for more than a second
    for rank in range(4):
        alone = [int(step) for label, _, step in lines if label == f"[rank {rank}"]
        assert alone == sorted(alone)


@pytest.mark.parametrize(
    ("given", "env"),
    [
        (["--log-line-prefix-template", "${role_name}|${rank}|${host}: "], {}),
        ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}|${rank}|${hostname}: "}),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": "${role_name}|${rank}|${hostname}: "}),
    ],
)
def test_a_template_makes_the_prefix(
    given: list[str], env: dict[str, str], fake_torch: object
) -> None:
    """torchrun's variable and its newer option, with torchrun's placeholders."""
    ours = run_meshrun(*given, ECHO, env=env)

    assert ours.stdout == f"default|0|{socket.gethostname()}: out 0\n"


def test_a_time_in_the_prefix_is_the_line_s_own(fake_torch: object) -> None:
    """${time} is the time when the line arrives."""
    ours = run_meshrun("--log-line-prefix-template", "${time} ", ECHO)
    day, clock, *rest = ours.stdout.split()

    assert rest == ["out", "0"]
    assert (len(day.split("-")), len(clock.split(":"))) == (3, 3)


def test_files_are_followed_while_ranks_run(fake_torch: object, tmp_path: Path) -> None:
    """A teed line is printed before its rank ends."""
    with start_meshrun(
        "--nproc-per-node",
        "2",
        "-t",
        "3",
        "--log-dir",
        tmp_path / "logs",
        PROGRAMS / "wait.py",
        folder=tmp_path,
    ) as running:
        running.wait_for("up", 2)
        running.process.terminate()
        running.wait()


def test_a_folder_that_cannot_be_made_starts_nothing(fake_torch: Path, tmp_path: Path) -> None:
    """The error names it, and torch is not even imported."""
    (tmp_path / "file").write_text("")
    ours = run_meshrun("-t", "3", "--log-dir", tmp_path / "file", ECHO)

    assert (ours.returncode, ours.stdout) == (2, "")
    assert f"error: --log-dir `{tmp_path / 'file'}` is a file, not a folder" in ours.stderr
    assert not fake_torch.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("made_before", [True, False])
def test_created_files_are_private(
    made_before: bool, umask: int, fake_torch: object, tmp_path: Path
) -> None:
    """So are folders, error files and copies of lines; an existing folder keeps its mode."""
    logs = tmp_path / "a" / "logs"
    if made_before:
        logs.mkdir(parents=True)
        logs.chmod(0o755)
    run_meshrun(
        *("--nproc-per-node", "2", "-t", "3", "--log-dir", logs),
        *("--duplicate-stdout-filters", "1", "--duplicate-stderr-filters", "1"),
        *(PROGRAMS / "end.py", "raise"),
        preexec_fn=partial(os.umask, umask),
        env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
    )
    below = [path for path in logs.rglob("*") if path != logs]
    modes = {path: path.stat().st_mode & 0o777 for path in below}
    made = [] if made_before else [logs, logs.parent]

    assert {modes[path] for path in below if path.is_dir()} == {0o700}
    assert {modes[path] for path in below if not path.is_dir()} == {0o600}
    assert {"error.json", "stdout.log", "stderr.log"} <= {path.name for path in below}
    assert {path.stat().st_mode & 0o777 for path in made} <= {0o700}
    assert not made_before or logs.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_temporary_folder_is_private(umask: int, fake_torch: object, tmp_path: Path) -> None:
    """Without --log-dir."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run_meshrun(
        *("--nproc-per-node", "2", "-r", "3", PROGRAMS / "end.py", "raise"),
        preexec_fn=partial(os.umask, umask),
        env={"TMPDIR": str(temporary)},
    )
    below = list(temporary.rglob("*"))

    assert below
    assert {path.stat().st_mode & 0o777 for path in below} == {0o700, 0o600}


def test_a_log_folder_that_was_removed_is_not_named(fake_torch: object, tmp_path: Path) -> None:
    """The report does not point to logs that do not exist."""
    program = tmp_path / "cleans_up.py"
    program.write_text("import shutil, sys\nshutil.rmtree(sys.argv[1])\nsys.exit(3)\n")
    words = ("-t", "3", "--log-dir", tmp_path / "logs", program, tmp_path / "logs")
    ours = run_meshrun(*words)

    assert ours.returncode == 3, ours.stderr
    assert "logs are in" not in ours.stderr
