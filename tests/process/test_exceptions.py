"""Programs that have a way of their own to print exceptions: it works, and the cause is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import run_meshrun

METHODS = pytest.mark.parametrize("method", ["fork", "exec"])
_CAUSE = "error: rank 0 raised ValueError: the loss is nan, exit code 1"


def run(tmp_path: Path, method: str, before: str) -> str:
    """Run a program that raises after the lines ``before``; return what was said on stderr."""
    program = tmp_path / "raises.py"
    program.write_text(f"import sys\n{before}\nraise ValueError('the loss is nan')\n")
    ours = run_meshrun("--start-method", method, program, cwd=tmp_path)
    assert ours.returncode == 1
    assert "/meshrun/worker/" not in ours.stderr
    assert ours.stderr.splitlines()[-2] == _CAUSE
    return ours.stderr


_HANDLED = "exited while handling ValueError: the loss is nan"


@METHODS
@pytest.mark.parametrize(
    ("leaves", "code", "last"),
    [
        ("except ValueError: print('no luck'); sys.exit(3)", 3, f"{_HANDLED}, exit code 3"),
        ("except ValueError: sys.exit(1)", 1, f"{_HANDLED}, exit code 1"),
        ("except ValueError: exit(3)", 3, f"{_HANDLED}, exit code 3"),
        ("except ValueError: raise SystemExit(3) from None", 3, "exited with code 3"),
        ("except ValueError: (lambda: sys.exit(3))()", 3, "exited with code 3"),
        (
            "except ValueError:\n    try: sys.exit('why')\n    except SystemExit: sys.exit(3)",
            3,
            "exited with code 3",
        ),
        ("except ValueError: sys.exit('no luck')", 1, "exited with code 1: no luck"),
        ("except ValueError: sys.exit(0)", 0, ""),
        ("except ValueError: pass\nsys.exit(3)", 3, "exited with code 3"),
    ],
)
def test_an_error_that_a_program_exits_for_is_told(
    method: str, leaves: str, code: int, last: str, *, fake_torch: object, tmp_path: Path
) -> None:
    """As hydra does, which prints it in a way of its own; it is not printed again.

    What a function does that the handler calls may have another reason.
    """
    program = tmp_path / "leaves.py"
    program.write_text(f"import sys\ntry:\n    raise ValueError('the loss is nan')\n{leaves}\n")
    ours = run_meshrun("--start-method", method, program, cwd=tmp_path)

    assert ours.returncode == code
    assert "Traceback" not in ours.stderr
    assert not last or ours.stderr.splitlines()[-2] == f"error: rank 0 {last}"
    if _HANDLED in last:
        assert ours.stderr.splitlines()[-1].startswith("       leaves.py:3 in <module>, on ")


@METHODS
def test_a_hook_prints_instead(method: str, fake_torch: object, tmp_path: Path) -> None:
    """sys.excepthook is called once, and nothing is printed twice."""
    said = run(
        tmp_path, method, "sys.excepthook = lambda *got: print('mine', got[1], file=sys.stderr)"
    )

    assert said.count("[rank 0] mine the loss is nan\n") == 1
    assert "Traceback" not in said


@METHODS
def test_a_hook_that_fails_hides_nothing(method: str, fake_torch: object, tmp_path: Path) -> None:
    """Python prints the error of the hook and the exception; so do we."""
    said = run(tmp_path, method, "sys.excepthook = lambda *got: print('mine', got[7])")

    assert "[rank 0] Error in sys.excepthook:" in said
    assert "[rank 0] IndexError: tuple index out of range" in said
    assert said.count("Traceback (most recent call last):") == 2
    assert "During handling of" not in said


@METHODS
def test_a_stream_in_place_of_stderr_gets_the_traceback(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """A program that sends sys.stderr to its own log finds there why it ended."""
    said = run(tmp_path, method, "sys.stderr = open('own.log', 'w')")

    log = (tmp_path / "own.log").read_text()
    assert log.startswith("Traceback (most recent call last):\n")
    assert log.endswith("\nValueError: the loss is nan\n")
    assert log in said


def test_a_stream_that_was_closed_does_no_harm(fake_torch: object, tmp_path: Path) -> None:
    """What stands in for sys.stderr need not work."""
    assert "Traceback" in run(tmp_path, "fork", "sys.stderr = open('x', 'w'); sys.stderr.close()")


@METHODS
def test_a_program_that_closed_all_descriptors_prints_its_exception_itself(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """As daemons close them, ours too; then the launcher knows the exit code alone."""
    program = tmp_path / "closes.py"
    program.write_text("import os\nos.closerange(3, 256)\nraise ValueError('the loss is nan')\n")
    ours = run_meshrun("--start-method", method, program)

    assert ours.returncode == 1
    assert ours.stderr.count("[rank 0] Traceback (most recent call last):\n") == 1
    assert ours.stderr.count("[rank 0] ValueError: the loss is nan\n") == 1
    assert "error: rank 0 exited with code 1\n" in ours.stderr


def test_a_folder_that_goes_while_ranks_run_hides_nothing(
    fake_torch: object, tmp_path: Path
) -> None:
    """The report then shows whole paths."""
    here = tmp_path / "here"
    here.mkdir()
    said = run(here, "fork", "import os, shutil\nshutil.rmtree(os.getcwd())")

    assert f"{here}/raises.py:4 in <module>, on " in said.splitlines()[-1]


_OF_NCCLS_WATCHDOG = """\
[rank0]:[E1125 10:00:00 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process \
group watchdog thread terminated with exception: CUDA error: {error}
{stack}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with \
exception: CUDA error: {error}
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
{stack}
Exception raised from run at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2063:
{stack}
"""
_STACK = "".join(
    f"frame #{number}: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char, "
    f"std::char_traits<char>, std::allocator<char> >) + 0x{number:x}0 (0x7f00 in /torch/lib/libc)\n"
    for number in range(16)
)


def test_an_error_of_a_gpu_that_nccls_watchdog_met_first_is_the_cause(
    fake_torch: object, tmp_path: Path
) -> None:
    """It ends the process before the program has looked; the stacks of C++ follow the error."""
    error = "an illegal memory access was encountered"
    program = tmp_path / "aborts.py"
    text = _OF_NCCLS_WATCHDOG.format(error=error, stack=_STACK)
    program.write_text(
        f"import os, sys\nsys.stderr.write({text!r})\nsys.stderr.flush()\nos.abort()\n"
    )
    ours = run_meshrun(program)

    assert ours.returncode == 134
    (said,) = [line for line in ours.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: rank 0 was killed by SIGABRT (CUDA error: {error})")


def test_an_error_whose_exit_code_an_exit_handler_hides_is_the_cause(
    fake_torch: object, tmp_path: Path
) -> None:
    """The others were stopped because of it, and only they failed by their exit codes."""
    (program := tmp_path / "hides.py").write_text(
        "import atexit, os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(60)\n"
        "atexit.register(os._exit, 0)\n"
        "raise ValueError('the loss is nan')\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", program)

    assert ours.returncode == 1, ours.stderr
    assert "error: rank 1 raised ValueError: the loss is nan, exit code 1" in ours.stderr
    assert "not sent by meshrun" not in ours.stderr
