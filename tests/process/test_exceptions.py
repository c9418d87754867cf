"""Programs that print exceptions themselves: this works, and the cause is still reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit import run_meshrun

METHODS = pytest.mark.parametrize("method", ["fork", "exec"])
_CAUSE = "error: rank 0 raised ValueError: the loss is nan, exit code 1"


def run(tmp_path: Path, method: str, before: str) -> str:
    """Run a program that raises after the lines ``before``; return its stderr."""
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
def test_an_exception_that_a_program_exits_for_is_reported(
    method: str, leaves: str, code: int, last: str, *, fake_torch: object, tmp_path: Path
) -> None:
    """Hydra, for one, prints the exception itself and exits, so it is not printed again.

    If a function that the handler calls exits, it may do so for another reason.
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
def test_an_excepthook_prints_instead(method: str, fake_torch: object, tmp_path: Path) -> None:
    """sys.excepthook is called once, and nothing else prints the exception."""
    stderr = run(
        tmp_path, method, "sys.excepthook = lambda *got: print('mine', got[1], file=sys.stderr)"
    )

    assert stderr.count("[rank 0] mine the loss is nan\n") == 1
    assert "Traceback" not in stderr


@METHODS
def test_an_excepthook_that_fails_hides_nothing(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """The hook's error and the exception are printed, as by Python."""
    stderr = run(tmp_path, method, "sys.excepthook = lambda *got: print('mine', got[7])")

    assert "[rank 0] Error in sys.excepthook:" in stderr
    assert "[rank 0] IndexError: tuple index out of range" in stderr
    assert stderr.count("Traceback (most recent call last):") == 2
    assert "During handling of" not in stderr


@METHODS
def test_a_stream_in_place_of_stderr_gets_the_traceback(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """A program that redirects sys.stderr to its own log finds the cause there."""
    stderr = run(tmp_path, method, "sys.stderr = open('own.log', 'w')")

    log = (tmp_path / "own.log").read_text()
    assert log.startswith("Traceback (most recent call last):\n")
    assert log.endswith("\nValueError: the loss is nan\n")
    assert log in stderr


def test_a_second_interrupt_does_not_interrupt_the_report_of_the_first(
    fake_torch: object, tmp_path: Path
) -> None:
    """Slurm may send SIGINT to every process, and meshrun passes it on."""
    (program := tmp_path / "program.py").write_text(
        "import os, signal, sys\n"
        "class Interrupted:\n"
        "    def write(self, text): os.kill(os.getpid(), signal.SIGINT)\n"
        "    def flush(self): pass\n"
        "sys.stderr = Interrupted()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ours = run_meshrun("--nproc-per-node", "1", program)

    assert ours.returncode == 130
    assert "error: rank 0 raised KeyboardInterrupt\n" in ours.stderr


def test_a_closed_stream_in_place_of_stderr_does_no_harm(
    fake_torch: object, tmp_path: Path
) -> None:
    assert "Traceback" in run(tmp_path, "fork", "sys.stderr = open('x', 'w'); sys.stderr.close()")


@METHODS
def test_a_program_that_closed_all_descriptors_prints_its_exception_itself(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """Daemons close all descriptors, meshrun's too; the launcher then knows only the exit code."""
    program = tmp_path / "closes.py"
    program.write_text("import os\nos.closerange(3, 4096)\nraise ValueError('the loss is nan')\n")
    ours = run_meshrun("--start-method", method, program)

    assert ours.returncode == 1
    assert ours.stderr.count("[rank 0] Traceback (most recent call last):\n") == 1
    assert ours.stderr.count("[rank 0] ValueError: the loss is nan\n") == 1
    assert "error: rank 0 exited with code 1\n" in ours.stderr


_DAEMON = """\
import os, socket, meshrun
os.closerange(3, 256)
pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
meshrun.heartbeat()
for end in (end for pair in pairs for end in pair):
    end.setblocking(False)
    try:
        print("got", end.recv(1000), file=sys.stderr)
    except BlockingIOError:
        pass"""


@METHODS
def test_nothing_is_reported_to_a_connection_of_the_program(
    method: str, fake_torch: object, tmp_path: Path
) -> None:
    """That has the number of a descriptor of meshrun's, which a daemon has closed."""
    assert "got" not in run(tmp_path, method, _DAEMON)


def test_a_folder_removed_while_ranks_run_hides_nothing(fake_torch: object, tmp_path: Path) -> None:
    """The report then shows absolute paths."""
    here = tmp_path / "here"
    here.mkdir()
    stderr = run(here, "fork", "import os, shutil\nshutil.rmtree(os.getcwd())")

    assert f"{here}/raises.py:4 in <module>, on " in stderr.splitlines()[-1]


_NCCL_WATCHDOG_OUTPUT = """\
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


def test_a_gpu_error_that_nccls_watchdog_met_first_is_the_cause(
    fake_torch: object, tmp_path: Path
) -> None:
    """It aborts the process before the program sees the error, and prints C++ stacks after it.

    The rank is hidden and has no file, so that only its end is kept.
    """
    error = "an illegal memory access was encountered"
    program = tmp_path / "aborts.py"
    text = _NCCL_WATCHDOG_OUTPUT.format(error=error, stack=_STACK)
    program.write_text(
        f"import os, sys\nsys.stderr.write({text!r})\nsys.stderr.flush()\nos.abort()\n"
    )
    ours = run_meshrun("--nproc-per-node", "1", "--hide", "rank=0", program)

    assert ours.returncode == 134
    assert "[rank 0]" not in ours.stderr
    (cause,) = [line for line in ours.stderr.splitlines() if line.startswith("error: ")]
    assert cause.startswith(f"error: rank 0 was killed by SIGABRT (CUDA error: {error})")


_ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: operator(): block: [0,0,0], thread:"
    " [{thread},0,0] Assertion `-sizes[i] <= index && index < sizes[i] && "
    '"index out of bounds"` failed.\n'
)
_ON_ASSERTION = "CUDA error: device-side assert triggered"
_CUDNN = "cuDNN error: CUDNN_STATUS_MAPPING_ERROR"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (f"raise RuntimeError({_ON_ASSERTION!r})", f"raised RuntimeError: {_ON_ASSERTION} ("),
        ("os.abort()", f"was killed by SIGABRT ({_ON_ASSERTION}; "),
        (f"raise RuntimeError({_CUDNN!r})", f"raised RuntimeError: {_CUDNN} ("),
    ],
    ids=["exception", "watchdog", "later"],
)
def test_an_assertion_in_a_kernel_is_named(
    end: str, how: str, fake_torch: object, tmp_path: Path
) -> None:
    """CUDA prints it for each thread; neither torch's exception nor NCCL's watchdog has it."""
    text = "".join(_ASSERTION.format(thread=thread) for thread in range(64))
    if end == "os.abort()":
        text += _NCCL_WATCHDOG_OUTPUT.format(error=_ON_ASSERTION[12:], stack="")
    program = tmp_path / "asserts.py"
    program.write_text(f"import os, sys\nprint({text!r}, file=sys.stderr, flush=True)\n{end}\n")
    ours = run_meshrun(program)

    (cause,) = [line for line in ours.stderr.splitlines() if line.startswith("error: ")]
    why = 'IndexKernel.cu:111: `-sizes[i] <= index && index < sizes[i] && "index out of bounds"`)'
    assert cause.startswith(f"error: rank 0 {how}{why}"), cause


def test_threads_of_a_rank_that_raised_may_still_need_the_others(
    fake_torch: object, tmp_path: Path
) -> None:
    """An asynchronous checkpoint of all ranks is complete before they are stopped."""
    program = tmp_path / "saves.py"
    program.write_text(
        "import os, threading, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def wait_for(path):\n"
        "    while not os.path.exists(path): time.sleep(0.01)\n"
        "def save():\n"
        "    if rank == 0: threading.main_thread().join()\n"
        "    open(f'part{rank}', 'w').close()\n"
        "    wait_for(f'part{1 - rank}')\n"
        "    open(f'whole{rank}', 'w').close()\n"
        "    if rank == 0: wait_for('whole1')\n"
        "threading.Thread(target=save).start()\n"
        "if rank == 0: raise ValueError('the loss is nan')\n"
        "wait_for('never')\n"
    )
    ours = run_meshrun("--nproc-per-node", "2", program, cwd=tmp_path)

    assert (ours.returncode, ours.stderr.splitlines()[-2]) == (1, _CAUSE)
    assert sorted(path.name for path in tmp_path.glob("whole*")) == ["whole0", "whole1"]


def test_an_error_whose_exit_code_an_exit_handler_hides_is_the_cause(
    fake_torch: object, tmp_path: Path
) -> None:
    """Only the other ranks, which were stopped because of it, have failing exit codes."""
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


def test_an_exception_of_a_signal_while_another_is_reported_is_reported(
    fake_torch: object, tmp_path: Path
) -> None:
    """DataLoader raises on the death of a worker, which a read from it may notice first."""
    (program := tmp_path / "signalled.py").write_text(
        "import signal, traceback\n"
        "def on_signal(*_): raise ValueError('the loss is nan')\n"
        "signal.signal(signal.SIGCHLD, on_signal)\n"
        "format = traceback.format_exception\n"
        "def interrupted(*args):\n"
        "    traceback.format_exception = format\n"
        "    signal.raise_signal(signal.SIGCHLD)\n"
        "traceback.format_exception = interrupted\n"
        "raise ConnectionResetError('a worker is gone')\n"
    )
    ours = run_meshrun(program)

    assert (ours.returncode, ours.stderr.splitlines()[-2]) == (1, _CAUSE), ours.stderr
    assert "ConnectionResetError: a worker is gone" in ours.stderr
    assert "/meshrun/worker/" not in ours.stderr


@pytest.mark.parametrize(
    ("active", "why"),
    [
        ({"VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda"}, "/venv"),
        ({"VIRTUAL_ENV": "", "CONDA_PREFIX": "/conda"}, "/conda"),
        ({"VIRTUAL_ENV": f"{sys.prefix}/", "CONDA_PREFIX": "/conda"}, None),
        ({"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}, None),
    ],
)
def test_a_module_is_not_found_in_another_environment_than_the_active_one(
    active: dict[str, str], why: str | None, *, fake_torch: object, tmp_path: Path
) -> None:
    """As if pipx or `uv tool` had installed meshrun, apart from the program's packages."""
    (program := tmp_path / "imports.py").write_text("import not_there\n")
    ours = run_meshrun(program, env=active)

    where = f"meshrun is installed in `{sys.prefix}`, not in the active environment `{why}`"
    raised = "error: rank 0 raised ModuleNotFoundError: No module named 'not_there'"
    assert ours.returncode == 1
    assert ours.stderr.splitlines()[-2] == f"{raised}{f' ({where})' if why else ''}, exit code 1"
