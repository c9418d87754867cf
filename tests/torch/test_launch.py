"""launch(): what a program gets back from ranks, and that nothing is left of them."""

import functools
import importlib.util
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

import meshrun
from meshrun.errors import ProgramError, SpecError, UsageError
from tests.kit import PROGRAMS, wait_until

pytestmark = pytest.mark.torch
run = functools.partial(meshrun.launch, device="cpu")


class WrongLossError(Exception):
    """Takes more than one argument, and compares by what it is."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(step, loss)
        self.loss = loss


class StubbornError(Exception):
    """Cannot be made from its args, so it cannot be unpickled."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def rank() -> int:
    return int(os.environ["RANK"])


def add(left: int, right: int) -> int:
    return left + right + rank()


def wrong_loss() -> None:
    raise WrongLossError(7, 0.5)


def on_rank_1(do: Callable[[], object]) -> None:
    """Do something on rank 1; the others wait to be ended."""
    if rank() != 1:
        signal.pause()
    do()


def sum_along_tp() -> Any:
    import torch

    mesh = meshrun.current_mesh()
    total = torch.tensor([1.0 + mesh.get_rank()])
    torch.distributed.all_reduce(total, group=mesh.get_group("tp"))
    return tuple(mesh.get_coordinate()), total


def test_a_function_has_its_mesh_and_returns_tensors() -> None:
    """Each rank's value in the order of ranks."""
    found = run(sum_along_tp, mesh="2x2", names=["dp", "tp"])

    assert [coordinate for coordinate, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [total.item() for _, total in found] == [3.0, 3.0, 7.0, 7.0]


def test_args_and_kwargs_reach_every_rank(fake_torch: Path) -> None:
    """Of a function that is found by its name."""
    assert run(add, args=(10,), kwargs={"right": 100}, nproc_per_node=3) == [110, 111, 112]


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_closures_and_lambdas_travel(method: str, fake_torch: Path) -> None:
    """With what they close over; the program's own arguments stay out of it."""
    offset = 5

    def shifted() -> tuple[int, list[str]]:
        return offset + rank(), sys.argv[1:]

    assert run(shifted, nproc_per_node=2, start_method=method) == [(5, []), (6, [])]
    assert run(lambda: offset, start_method=method) == [5]


def test_a_module_that_was_loaded_from_its_file_travels(fake_torch: Path, tmp_path: Path) -> None:
    """As pytest's importlib mode loads it: no rank could import it by its name."""
    path = tmp_path / "loaded.py"
    path.write_text("def helper():\n    return 3\n\ndef function():\n    return helper()\n")
    spec = importlib.util.spec_from_file_location("loaded_from_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loaded_from_file"] = module
    try:
        spec.loader.exec_module(module)
        assert run(module.function) == [3]
    finally:
        del sys.modules["loaded_from_file"]


def test_the_callers_path_is_the_ranks(
    fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module beside the caller's script is found, from another working folder too."""
    (tmp_path / "helper_of_this_test.py").write_text("def function(): return __file__\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("helper_of_this_test").function

    assert run(function, cwd="/") == [str(tmp_path / "helper_of_this_test.py")]


def test_an_exception_keeps_its_type_and_shows_the_ranks_traceback(
    fake_torch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the cause, with the rank and its coordinate, and none of meshrun's frames."""
    with pytest.raises(WrongLossError) as caught:
        run(on_rank_1, args=(wrong_loss,), nproc_per_node=2)
    cause = str(caught.value.__cause__)

    assert (caught.value.args, caught.value.loss) == ((7, 0.5), 0.5)
    assert cause.splitlines()[2].startswith(f"rank 1 on {os.uname().nodename}, pid ")
    assert f'File "{__file__}", line' in cause
    assert "in wrong_loss" in cause
    assert "/meshrun/" not in cause


def test_the_cause_names_the_coordinate() -> None:
    """With a mesh there is one."""
    with pytest.raises(WrongLossError) as caught:
        run(wrong_loss, mesh="dp=1")

    assert "rank 0 [dp0] on " in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_made_here_is_told(fake_torch: Path) -> None:
    """Its traceback is there all the same."""

    def stubborn() -> None:
        raise StubbornError(reason="no")

    with pytest.raises(meshrun.RankFailed) as caught:
        run(stubborn)

    assert "StubbornError: no" in str(caught.value.__cause__)


def test_an_exception_beside_exception_comes_back(fake_torch: Path) -> None:
    """Of a class that the function made."""

    class Stopped(BaseException):
        pass

    def stop() -> None:
        raise Stopped("enough")

    with pytest.raises(Stopped, match="enough"):
        run(stop)


@pytest.mark.parametrize(
    ("end", "code", "signum"),
    [
        (lambda: sys.exit(3), 3, None),
        (lambda: os._exit(4), 4, None),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, signal.SIGKILL),
    ],
    ids=["sys.exit", "os._exit", "SIGKILL"],
)
def test_a_rank_that_ends_without_an_exception(
    end: Callable[[], object], code: int, signum: int | None, fake_torch: Path
) -> None:
    """Is told by RankFailed, with the whole result."""
    with pytest.raises(meshrun.RankFailed) as caught:
        run(on_rank_1, args=(end,), nproc_per_node=2)
    first = caught.value.result.failures[0]

    assert caught.value.exit_code == code
    assert (first.rank, first.signum) == (1, signum)


def test_a_rank_that_leaves_early_has_no_value(fake_torch: Path) -> None:
    """An exit code of 0 is no return."""
    with pytest.raises(meshrun.MeshrunError, match="rank 1 ended with exit code 0 before"):
        run(lambda: rank() == 1 and sys.exit(), nproc_per_node=2)


def test_a_value_that_cannot_be_pickled(fake_torch: Path) -> None:
    """The error names the rank and the type."""

    def numbers() -> Iterator[int]:
        return (number for number in range(3))

    with pytest.raises(TypeError, match="rank 0 returned a value of type generator that cannot"):
        run(numbers)


def test_a_call_that_cannot_be_pickled(fake_torch: Path) -> None:
    """Nothing is started."""
    with pytest.raises(UsageError, match="`add` and its arguments cannot be pickled"):
        run(add, args=(iter(()), (number for number in ())))


def test_restarts_do_not_mix_generations(fake_torch: Path) -> None:
    """Values and exceptions are those of the last generation."""

    def generation() -> int:
        count = meshrun.current_layout().generation
        if count == 0:
            on_rank_1(wrong_loss)
        return count

    def worse() -> None:
        on_rank_1(die if int(os.environ["MESHRUN_GENERATION"]) else wrong_loss)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert run(generation, nproc_per_node=2, max_restarts=1) == [1, 1]
    with pytest.raises(meshrun.RankFailed) as caught:
        run(worse, nproc_per_node=2, max_restarts=1)
    assert caught.value.exit_code == 137


def test_a_script_returns_its_result(
    fake_torch: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With its output where this process's goes."""
    (tmp_path / "hello.py").write_text("import os, sys\nprint(sys.argv[1], os.environ['WHO'])\n")
    result = run("hello.py", args=["--lr"], nproc_per_node=2, cwd=tmp_path, env={"WHO": "me"})

    assert (result.exit_code, result.failures) == (0, ())
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] --lr me", "[rank 1] --lr me"]
    result.raise_for_failure()


def test_a_script_reads_stdin_and_a_function_does_not(fake_torch: Path, tmp_path: Path) -> None:
    """A function has nobody who would type for it."""
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
    """It raises only when asked to."""
    result = run(PROGRAMS / "end.py", args=["raise"], nproc_per_node=2)
    raised = result.failures[0].raised

    assert (result.exit_code, result.failures[0].rank) == (1, 1)
    assert raised is not None
    assert (raised.kind, raised.message) == ("ValueError", "the loss is nan")
    with pytest.raises(meshrun.RankFailed):
        result.raise_for_failure()


@pytest.mark.parametrize(
    ("program", "flags", "kind", "says"),
    [
        ("train.py", {"mesh": "dp=x"}, SpecError, ("`x` is not a size", "write sizes joined")),
        ("train.py", {"options": ["--mehs"]}, UsageError, ("no such option: --mehs", "`--mesh`")),
        ("nowhere.py", {}, ProgramError, ("can't open file", None)),
        ("train.py", {"args": "--lr 1"}, UsageError, ("args is a list", "args=text.split()")),
        ("train.py", {"kwargs": {}}, UsageError, ("kwargs are for a function", "a script has")),
        (add, {"module": True}, UsageError, ("module=True is for", None)),
        (None, {}, UsageError, ("the program is a path or a function", None)),
    ],
)
def test_a_wrong_request_raises_what_the_command_line_says(
    program: object,
    flags: dict[str, Any],
    kind: type[UsageError],
    says: tuple[str, str | None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Instead of printing it."""
    message, hint = says
    with pytest.raises(kind) as caught:
        run(program, **flags)

    assert message in caught.value.message
    assert (hint or "") in (caught.value.hint or "")
    assert (caught.value.hint is None) == (hint is None)
    assert capfd.readouterr() == ("", "")


def test_a_spec_error_points_at_the_text() -> None:
    """Its position comes along."""
    with pytest.raises(SpecError) as caught:
        run(add, mesh="dp=x")

    assert (caught.value.text, caught.value.position) == ("dp=x", 3)


def test_a_look_has_no_values(fake_torch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dry-run starts no rank."""
    with pytest.raises(UsageError, match="no rank was started"):
        run(add, options=["--dry-run"])
    assert "each rank:" in capsys.readouterr().out


def speak() -> None:
    print("to stdout é")
    os.write(2, b"to stderr \xff\n")


def test_capsys_sees_what_ranks_print(fake_torch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Although it replaces sys.stdout alone."""
    run(speak)

    assert capsys.readouterr() == ("[rank 0] to stdout é\n", "[rank 0] to stderr \\xff\n")


def test_a_redirected_stream_loses_nothing(fake_torch: Path) -> None:
    """Much output, and characters that the stream cannot say."""
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


def test_a_thread_may_launch(fake_torch: Path) -> None:
    """Several do, side by side."""
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda size: run(rank, nproc_per_node=size), [1, 2]))

    assert found == [[0], [0, 1]]


def test_a_rank_may_launch(fake_torch: Path) -> None:
    """With ranks of its own."""

    def nested() -> list[int]:
        return meshrun.launch(rank, nproc_per_node=2, device="cpu")

    assert run(nested, nproc_per_node=2) == [[0, 1], [0, 1]]


def test_a_keyboard_interrupt_ends_the_launch(fake_torch: Path) -> None:
    """It comes back once nothing is left; a handler stays what it was."""

    def interrupt(pid: int) -> None:
        os.kill(pid, signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, args=(os.getpid(),))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_three_interrupts_wait_for_nobody(fake_torch: Path) -> None:
    """A rank that is deaf to signals ends all the same."""

    def interrupt(pid: int) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: os.kill(pid, signal.SIGINT))
        os.kill(pid, signal.SIGINT)
        while True:
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, args=(os.getpid(),), shutdown_timeout=600)


SCRIPT = """\
import os, signal, sys
import meshrun

print("imported", flush=True)
LIMIT = 3

class Point:
    def __init__(self, rank):
        self.rank = rank

class NanError(Exception):
    pass

def function():
    return Point(int(os.environ["RANK"]) + LIMIT)

def fail():
    raise NanError("nan")

def wait():
    print("up", flush=True)
    signal.pause()
"""
BODY = """\
points = meshrun.launch(function, nproc_per_node=2, device="cpu")
print([type(point) is Point and point.rank for point in points])
try:
    meshrun.launch(fail, device="cpu")
except NanError as error:
    print(error)
"""


def python(*words: str | Path, cwd: Path, typed: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, input=typed, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("guard", [True, False])
def test_functions_of_a_script_need_no_guard(guard: bool, fake_torch: Path, tmp_path: Path) -> None:
    """The script is run once, by its caller; its classes are the same there and back."""
    body = f"if __name__ == '__main__':\n    {BODY.replace(chr(10), chr(10) + '    ')}"
    (tmp_path / "script.py").write_text(SCRIPT + (body if guard else BODY))
    ours = python("script.py", cwd=tmp_path)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == "imported\n[3, 4]\nnan\n"


def test_functions_of_a_notebook_travel(fake_torch: Path, tmp_path: Path) -> None:
    """Cells are executed in a namespace, with streams of the notebook's own."""
    (tmp_path / "cells.txt").write_text(SCRIPT + BODY + "meshrun.launch(lambda: print(LIMIT))\n")
    kernel = (
        "import contextlib, io, sys\n"
        "stream = io.StringIO()\n"
        "with contextlib.redirect_stdout(stream):\n"
        "    exec(open('cells.txt').read(), {'__name__': '__main__'})\n"
        "print(repr(stream.getvalue()))\n"
    )
    ours = python("-c", kernel, cwd=tmp_path)

    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == repr("imported\n[3, 4]\nnan\n[rank 0] 3\n") + "\n"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_caller_that_is_killed_leaves_nothing(
    signum: int, fake_torch: Path, tmp_path: Path
) -> None:
    """Neither a process nor the folder, which the fixture checks."""
    (tmp_path / "script.py").write_text(
        SCRIPT + "meshrun.launch(wait, nproc_per_node=2, device='cpu')\n"
    )
    printed = tmp_path / "printed"
    with open(printed, "wb") as file:
        caller = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=file)
    try:
        wait_until(lambda: printed.read_text().count("up") == 2, printed.read_text)
    finally:
        caller.send_signal(signum)

    assert caller.wait() == -signum


def test_a_caller_that_is_killed_early_leaves_nothing(fake_torch: Path, tmp_path: Path) -> None:
    """While its launcher is still being loaded."""
    (tmp_path / "script.py").write_text(SCRIPT + "meshrun.launch(wait, device='cpu')\n")
    caller = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    try:
        wait_until(lambda: bool(psutil.Process(caller.pid).children()), lambda: "no launcher")
    finally:
        caller.kill()
    caller.wait()
