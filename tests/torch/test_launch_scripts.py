"""launch() of scripts and modules, invalid requests, and where output goes."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshrun
from meshrun.errors import ProgramError, SpecError, UsageError
from tests.kit import NONE_STARTED, PROGRAMS
from tests.launching import add, python, run

pytestmark = pytest.mark.torch


def test_a_script_returns_its_result(
    fake_torch: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its output goes where this process's goes."""
    (tmp_path / "hello.py").write_text("import os, sys\nprint(sys.argv[1], os.environ['WHO'])\n")
    result = run("hello.py", args=["--lr"], nproc_per_node=2, cwd=tmp_path, env={"WHO": "me"})

    assert (result.exit_code, result.failures) == (0, ())
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] --lr me", "[rank 1] --lr me"]
    result.raise_for_failure()


def test_a_script_reads_stdin_and_a_function_does_not(fake_torch: Path, tmp_path: Path) -> None:
    """A function gets an empty stdin."""
    (tmp_path / "read.py").write_text("import sys\nprint(sys.stdin.read())\n")
    (tmp_path / "script.py").write_text(
        "import meshrun, sys\n"
        "print(meshrun.launch(lambda: sys.stdin.read(), device='cpu'))\n"
        "meshrun.launch('read.py', prefix=False, device='cpu')\n"
    )
    ours = python("script.py", cwd=tmp_path, typed="typed")

    assert (ours.returncode, ours.stdout) == (0, "['']\ntyped\n"), ours.stderr


def test_a_module_runs_and_its_lines_may_be_plain(
    fake_torch: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """module=True and prefix=False."""
    (tmp_path / "greet.py").write_text("print(__name__)\n")

    assert run("greet", module=True, prefix=False, cwd=tmp_path).exit_code == 0
    assert capsys.readouterr().out == "__main__\n"


def test_a_script_that_fails_returns_its_failures(fake_torch: Path) -> None:
    """Only raise_for_failure() raises."""
    result = run(PROGRAMS / "end.py", args=["raise"], nproc_per_node=2)
    raised = result.failures[0].raised

    assert (result.exit_code, result.failures[0].rank) == (1, 1)
    assert raised is not None
    assert (raised.kind, raised.message) == ("ValueError", "the loss is nan")
    with pytest.raises(meshrun.RankFailed):
        result.raise_for_failure()


@pytest.mark.parametrize(
    ("program", "flags", "kind", "expected"),
    [
        ("train.py", {"mesh": "dp=x"}, SpecError, ("`x` is not a size", "write sizes joined")),
        ("train.py", {"options": ["--mehs"]}, UsageError, ("no such option: --mehs", "`--mesh`")),
        ("nowhere.py", {}, ProgramError, ("can't open file", None)),
        (add, {"options": ["--collapse", "5"]}, UsageError, ("`5` is neither an option nor", None)),
        (add, {"options": ["--role"]}, UsageError, ("--role requires a value", "--help --role")),
        (
            add,
            {"options": ["--per-task"]},
            UsageError,
            ("--per-task cannot be used with launch()", "meshrun.init_mesh() makes each"),
        ),
        ("train.py", {"args": "--lr 1"}, UsageError, ("args must be a list", "args=['--lr', '1']")),
        ("train.py", {"args": ["--lr", 1]}, UsageError, ("args must be a list of str or p", None)),
        (add, {"nproc_per_node": [2]}, UsageError, ("an int or a str, found [2]", None)),
        ("train.py", {"kwargs": {}}, UsageError, ("kwargs requires a function", "a script takes")),
        (add, {"module": True}, UsageError, ("module=True requires", None)),
        (
            add,
            {"env": {"MESHRUN_HOSTS": "a,b"}},
            UsageError,
            ("others: a, b (MESHRUN_HOSTS=a,b)", "on each node"),
        ),
        (
            add,
            {
                "nnodes": 2,
                "options": ["--node-rank=0", "--rdzv-endpoint=localhost:1"],
                "env": {"MESHRUN_HOSTS": "a,b"},
            },
            UsageError,
            ("--node-rank 0 cannot be used with a list of hosts", "remove --node-rank"),
        ),
        (
            add,
            {"nnodes": 2, "env": {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}},
            UsageError,
            ("--nnodes 2 in a Slurm shell", "node: srun --ntasks-per-node=1 python ..."),
        ),
        (
            "train.py",
            {"mesh": {"dp": 0}},
            SpecError,
            ("a size must be at least 1", "unused dim"),
        ),
        (None, {}, UsageError, ("program must be a str, a path or a function, found None", None)),
    ],
)
def test_an_invalid_request_raises_the_command_line_s_error(
    program: object,
    flags: dict[str, Any],
    kind: type[UsageError],
    expected: tuple[str, str | None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is not printed."""
    message, hint = expected
    with pytest.raises(kind) as caught:
        run(program, **flags)

    assert message in caught.value.message
    assert (hint or "") in (caught.value.hint or "")
    assert (caught.value.hint is None) == (hint is None)
    assert capfd.readouterr() == ("", "")


def test_a_spec_error_has_text_and_position() -> None:
    with pytest.raises(SpecError) as caught:
        run(add, mesh="dp=x")

    assert (caught.value.text, caught.value.position) == ("dp=x", 3)


def test_a_dry_run_of_a_function_returns_nothing(
    fake_torch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows the plan, and raises because no rank was started."""
    with pytest.raises(UsageError, match=NONE_STARTED):
        run(add, options=["--dry-run"])
    printed = capsys.readouterr().out
    assert "each rank:" in printed
    assert "--report" not in printed


def speak() -> None:
    print("to stdout é")
    os.write(2, b"to stderr \xff\n")


def test_capsys_sees_what_ranks_print(fake_torch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Although it replaces only sys.stdout and sys.stderr."""
    run(speak)

    assert capsys.readouterr() == ("[rank 0] to stdout é\n", "[rank 0] to stderr \\xff\n")


def test_a_stream_needs_only_write(fake_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """print() does not need more either."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append))
    run(print, args=("hello",))

    assert "".join(written) == "[rank 0] hello\n"


def test_a_redirected_stream_loses_nothing(fake_torch: Path) -> None:
    """Much output, and characters that the stream cannot encode."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    err = io.StringIO()

    def much() -> None:
        for number in range(20_000):
            print(f"line {number} é")
        speak()

    with redirect_stdout(out), redirect_stderr(err):
        run(much, prefix=False)
    out.seek(0)

    lines = out.read().splitlines()
    assert lines == [*(f"line {number} \\xe9" for number in range(20_000)), "to stdout \\xe9"]
    assert err.getvalue() == "to stderr \\xff\n"
