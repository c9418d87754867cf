"""Ranks that run an arbitrary command or another interpreter."""

import json
import stat
import sys
from pathlib import Path

import pytest

from meshrun.errors import ProgramError
from meshrun.plan.rank_program import Program
from meshrun.supervisor.program_file import check_program
from tests.kit import PROGRAMS, run_meshrun


def executable(folder: Path, text: str) -> Path:
    """Write an executable file."""
    path = folder / "program"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_any_command_can_be_run(tmp_path: Path, fake_torch: Path) -> None:
    """--no-python runs it unchanged, with a rank's variables; only the store imports torch."""
    program = executable(tmp_path, '#!/bin/sh\necho "$RANK of $WORLD_SIZE: $*"\n')
    ours = run_meshrun("--nproc-per-node", "2", "--no-python", program, "a", "x${local_rank}")

    assert sorted(ours.stdout.splitlines()) == ["[rank 0] 0 of 2: a x0", "[rank 1] 1 of 2: a x1"]
    # The store may be killed before it, or before it has written that it does.
    assert not fake_torch.exists() or len(fake_torch.read_text().splitlines()) <= 1


def test_a_command_that_fails_ends_the_launch(tmp_path: Path, fake_torch: object) -> None:
    """Its exit code becomes the launch's, and the other ranks are stopped."""
    program = executable(tmp_path, "#!/bin/sh\n[ $RANK = 1 ] && exit 7\nexec sleep 1000\n")
    ours = run_meshrun("--nproc-per-node", "3", "--no-python", program)

    assert ours.returncode == 7
    assert "error: rank 1 exited with code 7" in ours.stderr


def test_a_command_that_fails_is_restarted(tmp_path: Path, fake_torch: object) -> None:
    program = executable(tmp_path, "#!/bin/sh\n[ $TORCHELASTIC_RESTART_COUNT = 2 ]\n")
    ours = run_meshrun("--no-python", "--max-restarts", "3", program)

    assert ours.returncode == 0
    assert "restart 2 of 3" in ours.stderr


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("no_such_command", 127, "no command named `no_such_command`"),
        (str(PROGRAMS / "echo.py"), 126, "is not executable"),
        ("echo.sh", 127, "write ./echo.sh"),
        ("./folder", 127, "no command named `./folder`"),
    ],
)
def test_a_command_that_cannot_be_run(
    name: str, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit codes 126 and 127, as in a shell, which looks for commands only on PATH."""
    executable(tmp_path, "#!/bin/sh\n").rename(tmp_path / "echo.sh")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    ours = run_meshrun("--no-python", name)

    assert ours.returncode == code
    assert message in ours.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("./noexec", "run `chmod +x ./noexec`, or unset PYTHON_EXEC"),
        ("python3 -u", "PYTHON_EXEC must name an interpreter, or be unset"),
    ],
)
def test_another_interpreter_that_cannot_be_run(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint names the variable."""
    (tmp_path / "noexec").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHON_EXEC", name)
    with pytest.raises(ProgramError) as caught:
        check_program(Program(kind="command", target=name))

    assert caught.value.hint == hint


@pytest.mark.parametrize("text", ["echo $RANK\n", "#!/no/such/sh\n"])
def test_a_command_that_the_kernel_cannot_execute(
    text: str, tmp_path: Path, fake_torch: object
) -> None:
    """The hint concerns the file's first line, and no limits of the machine."""
    ours = run_meshrun("--no-python", executable(tmp_path, text))

    assert ours.returncode == 71
    assert "rank 0 could not be started" in ours.stderr
    assert "line" in ours.stderr.partition("hint: ")[2]
    assert "ulimit" not in ours.stderr


@pytest.mark.parametrize("options", [[], ["--hosts", "localhost"]])
def test_another_interpreter(options: list[str], tmp_path: Path, fake_torch: object) -> None:
    """PYTHON_EXEC names the interpreter; the arguments stay as they are."""
    wrapper = executable(tmp_path, f'#!/bin/sh\necho "wrapped $*"\nexec {sys.executable} "$@"\n')
    words = ("--nproc-per-node", "1", *options, PROGRAMS / "echo.py")
    ours = run_meshrun(*words, env={"PYTHON_EXEC": str(wrapper)})

    assert ours.stdout.splitlines() == [
        f"[rank 0] wrapped -u {PROGRAMS / 'echo.py'}",
        "[rank 0] out 0",
    ]


def test_a_command_s_error_file_is_reported(tmp_path: Path, fake_torch: object) -> None:
    program = executable(
        tmp_path,
        '#!/bin/sh\necho \'{"message": {"message": "ValueError: bad", "extraInfo": '
        '{"py_callstack": "..."}}}\' > "$TORCHELASTIC_ERROR_FILE"\nexit 1\n',
    )
    ours = run_meshrun("--no-python", program)

    assert "error: rank 0 raised ValueError: bad, exit code 1" in ours.stderr


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("os._exit(7)", "rank 0 exited with code 7"),
        ("os.kill(os.getpid(), 9)", "rank 0 was killed by SIGKILL"),
        ("raise KeyError('mine')", "rank 0 raised KeyError: 'mine'"),
        ("sys.exit(1)", "rank 0 raised OSError: theirs, exit code 1"),
    ],
)
def test_an_error_file_of_a_child_does_not_hide_the_rank_s_own_error(
    last: str, expected: str, tmp_path: Path, fake_torch: object
) -> None:
    """The program may have handled it and failed for another reason, which is then in the file."""
    program, child = tmp_path / "program.py", tmp_path / "child.py"
    record = json.dumps({"message": {"message": "OSError: theirs"}})
    child.write_text(
        f"import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({record!r})\n"
    )
    program.write_text(
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, {str(child)!r}], check=True)\n{last}\n"
    )
    logs = tmp_path / "logs"
    ours = run_meshrun("--nproc-per-node", "1", "--log-dir", logs, "-r", "2", program)

    assert f"error: {expected}" in ours.stderr
    (file,) = logs.glob("*/attempt_0/0/error.json")
    assert ("KeyError: 'mine'" in file.read_text()) == ("mine" in expected)


def test_a_failure_that_a_rank_handled_is_not_its_own(tmp_path: Path, fake_torch: object) -> None:
    """A launcher started by a rank reports to that rank alone."""
    program, failing = tmp_path / "program.py", tmp_path / "failing.py"
    failing.write_text("raise ValueError('inner')\n")
    program.write_text(
        "import os, subprocess, sys\n"
        f"inner = [sys.executable, '-m', 'meshrun', {str(failing)!r}]\n"
        "assert subprocess.run(inner).returncode == 1\n"
        "assert not os.path.exists(os.environ['TORCHELASTIC_ERROR_FILE'])\n"
        "sys.exit(1)\n"
    )
    ours = run_meshrun("--nproc-per-node", "1", program)

    assert "\nerror: rank 0 exited with code 1" in ours.stderr


def test_a_module_that_turns_warnings_into_errors(tmp_path: Path, fake_torch: object) -> None:
    """pytest would warn about meshrun's plug-in if the rank had imported it before pytest."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    words = ("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", tmp_path)
    ours = run_meshrun("--nproc-per-node", "1", *words)

    assert ours.returncode == 0, ours.stdout
    assert "1 passed" in ours.stdout
