"""launch() of functions: what ranks return, and how they fail."""

import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import meshrun
from meshrun.api.remote_call import raise_failure, read_values
from meshrun.api.worker_group import WorkerGroup
from meshrun.errors import HostError, UsageError
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.result import LaunchResult, RankFailure, Timings
from meshrun.worker.pickling import pickle_error
from tests.launching import add, rank, run

pytestmark = pytest.mark.torch


class WrongLossError(Exception):
    """An exception with more than one argument, and an attribute."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(step, loss)
        self.loss = loss


class StubbornError(Exception):
    """Cannot be created from its args, so it cannot be unpickled."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def wrong_loss() -> None:
    raise WrongLossError(7, 0.5)


def on_rank_1(do: Callable[[], object]) -> None:
    """Call ``do`` on rank 1; the others wait until they are stopped."""
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
    """Values come in the order of ranks."""
    found = run(sum_along_tp, mesh={"dp": 2, "tp": 2})

    assert [coordinate for coordinate, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [total.item() for _, total in found] == [3.0, 3.0, 7.0, 7.0]


def test_args_and_kwargs_reach_every_rank(fake_torch: Path) -> None:
    """Of a function that ranks import by its name."""
    assert run(add, args=(10,), kwargs={"right": 100}, nproc_per_node=3) == [110, 111, 112]


@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.nightly)])
def test_closures_and_lambdas_travel(method: str, fake_torch: Path) -> None:
    """With the values that they capture; ranks do not get the caller's sys.argv."""
    offset = 5

    def shifted() -> tuple[int, list[str]]:
        return offset + rank(), sys.argv[1:]

    assert run(shifted, nproc_per_node=2, start_method=method) == [(5, []), (6, [])]
    assert run(lambda: offset, start_method=method) == [5]


def test_a_module_that_was_loaded_from_its_file_travels(fake_torch: Path, tmp_path: Path) -> None:
    """No rank could import it by its name; pytest's importlib mode loads tests like this."""
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


def test_ranks_have_the_callers_path(
    fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module beside the caller's script is found, even with another working folder."""
    (tmp_path / "helper_of_this_test.py").write_text("def function(): return __file__\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("helper_of_this_test").function

    assert run(function, cwd="/") == [str(tmp_path / "helper_of_this_test.py")]


def test_a_relative_path_still_leads_to_the_same_folder(
    fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even after the caller has changed to a folder that is then removed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "relative_helper_of_this_test.py").write_text("def three(): return 3\n")
    monkeypatch.chdir(tmp_path)
    not_text: list[Any] = [None, tmp_path]  # which imports ignore
    monkeypatch.setattr(sys, "path", ["", *not_text, "lib", *sys.path])
    function = importlib.import_module("relative_helper_of_this_test").three
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert run(function, cwd=tmp_path) == [3]
    with pytest.raises(HostError, match="the current folder no longer exists"):
        run(function)


def test_an_exception_keeps_its_type_and_shows_the_ranks_traceback(
    fake_torch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cause has the rank and the traceback, without meshrun's frames."""
    with pytest.raises(WrongLossError) as caught:
        run(on_rank_1, args=(wrong_loss,), nproc_per_node=2)
    cause = str(caught.value.__cause__)

    assert (caught.value.args, caught.value.loss) == ((7, 0.5), 0.5)
    assert cause.splitlines()[2].startswith(f"rank 1 on {os.uname().nodename}, pid ")
    assert f'File "{__file__}", line' in cause
    assert "in wrong_loss" in cause
    assert "/meshrun/" not in cause


def test_the_cause_names_the_coordinate() -> None:
    """If there is a mesh."""
    with pytest.raises(WrongLossError) as caught:
        run(wrong_loss, mesh="dp=1")

    assert "rank 0 [dp0] on " in str(caught.value.__cause__)


def raise_it(error: BaseException) -> None:
    raise error


def raise_of_another_module() -> None:
    """Raise an exception whose class only the rank can import."""
    sys.modules["only_there"] = module = ModuleType("only_there")
    module.__dict__["Odd"] = odd = type("Odd", (ValueError,), {"__module__": "only_there"})
    raise odd("not here")


def test_an_exception_that_cannot_be_pickled_comes_back(fake_torch: Path) -> None:
    """With its message, class and picklable attributes; a MeshrunError replaces any other."""

    class Ends(OSError):
        """Would end the process that unpickles it."""

        def __init__(self, reason: str) -> None:
            super().__init__(5, reason, "a.txt")
            self.lock, self.kept = threading.Lock(), [3]

        def __reduce__(self) -> Any:
            return sys.exit, (3,)

    class Adds(Exception):
        """Would be created from its own message."""

        def __init__(self, reason: str) -> None:
            super().__init__(f"because of {reason}")

    class Slots(Exception):
        """A copy without its slot could not format its message."""

        __slots__ = ("size",)

        def __init__(self, size: int, _: int) -> None:
            super().__init__("too large")
            self.size = size

        def __str__(self) -> str:
            return f"size {self.size}"

    with WorkerGroup(nproc_per_node=1) as group:
        with pytest.raises(meshrun.MeshrunError, match=r"\Arank 0 raised .*Slots: size 3\Z"):
            group.call(lambda: raise_it(Slots(3, 4)))
        with pytest.raises(StubbornError, match=r"\Ano\Z"):
            group.call(lambda: raise_it(StubbornError(reason="no")))
        with pytest.raises(Adds, match=r"\Abecause of x\Z"):
            group.call(lambda: raise_it(Adds("x")))
        with pytest.raises(Ends, match=r"\A\[Errno 5\] disk: 'a.txt'\Z") as ends:
            group.call(lambda: raise_it(Ends("disk")))
        with pytest.raises(meshrun.MeshrunError, match=r"\Arank 0 raised Odd: not here\Z") as odd:
            group.call(raise_of_another_module)
        assert group.is_open
    assert (ends.value.errno, ends.value.kept, hasattr(ends.value, "lock")) == (5, [3], False)
    assert "raise_of_another_module" in str(odd.value.__cause__)

    with pytest.raises(StubbornError, match=r"\Ano\Z") as stubborn:
        run(lambda: raise_it(StubbornError(reason="no")))
    assert "in raise_it" in str(stubborn.value.__cause__)
    with pytest.raises(meshrun.RankFailed, match="rank 0 raised Odd: not here, exit code 1"):
        run(raise_of_another_module)


def test_a_base_exception_comes_back(fake_torch: Path) -> None:
    """Even if the function defines its class."""

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
    """launch() raises RankFailed, which has the whole result."""
    with pytest.raises(meshrun.RankFailed) as caught:
        run(on_rank_1, args=(end,), nproc_per_node=2)
    first = caught.value.result.failures[0]

    assert caught.value.exit_code == code
    assert (first.rank, first.signum) == (1, signum)


def stop_launcher() -> None:
    """Stop the launcher, as a user would."""
    psutil.Process().parents()[1].send_signal(signal.SIGTERM)
    signal.pause()


def test_a_launcher_that_is_stopped_blames_no_rank(fake_torch: Path) -> None:
    """It sends the ranks SIGTERM, but the cause is its own signal."""
    with pytest.raises(meshrun.RankFailed, match="the launch was stopped by SIGTERM, exit code"):
        run(stop_launcher, nproc_per_node=2)


def test_a_rank_that_leaves_early_has_no_value(fake_torch: Path) -> None:
    """Exit code 0 is not a return value."""
    with pytest.raises(meshrun.MeshrunError, match="rank 1 exited with code 0 before"):
        run(lambda: rank() == 1 and sys.exit(), nproc_per_node=2)


def test_each_of_two_nodes_gets_the_values_of_its_ranks(fake_torch: Path) -> None:
    """What a rank of the other node raises arrives as text."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"

    def on_node(node: int, function: Callable[[], object]) -> object:
        options = ["--node-rank", str(node), "--rdzv-endpoint", endpoint]
        try:
            return run(function, nnodes=2, nproc_per_node=2, options=options)
        except Exception as error:
            return error

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(on_node, (0, 1), (rank, rank))] == [[0, 1], [2, 3]]
        elsewhere, here = pool.map(on_node, (0, 1), (signal.pause, wrong_loss))

    assert isinstance(here, WrongLossError)
    assert isinstance(elsewhere, meshrun.RankFailed)
    assert "in wrong_loss" in str(elsewhere.__cause__)


def test_a_function_may_clear_its_environment(fake_torch: Path) -> None:
    def clear() -> int:
        own = rank()
        os.environ.clear()
        return own

    assert run(clear, nproc_per_node=2) == [0, 1]


def test_a_value_that_cannot_be_pickled(fake_torch: Path) -> None:
    """The error names the rank and the type."""

    def numbers() -> Iterator[int]:
        return (number for number in range(3))

    with pytest.raises(TypeError, match="the generator that rank 0 returned"):
        run(numbers)


class Strange:
    """Calls something else when it is unpickled."""

    def __init__(self, *does: object) -> None:
        self.does = does

    def __reduce__(self) -> Any:
        return self.does[0], self.does[1:]


def test_a_value_that_cannot_be_unpickled(fake_torch: Path) -> None:
    """Whatever unpickling raises, the error names the rank."""
    with pytest.raises(TypeError, match="cannot unpickle what rank 0 returned") as caught:
        run(Strange, args=(open, "/no/such/file"))

    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_call_that_cannot_be_pickled(fake_torch: Path) -> None:
    """Nothing is started."""
    with pytest.raises(UsageError, match="cannot pickle `add`"):
        run(add, args=(iter(()), (number for number in ())))


async def wait() -> None:
    """Return a coroutine."""


def count_up() -> Iterator[int]:
    """Yield a number."""
    yield 1


@pytest.mark.parametrize("call", [wait, count_up, partial(wait)])
def test_a_call_that_runs_nothing(fake_torch: Path, call: Callable[..., object]) -> None:
    """It returns a coroutine or generator that nobody would run; nothing is started."""
    with pytest.raises(UsageError, match=r"is an? (async function|generator)") as caught:
        run(call)
    assert "`def main(): return " in str(caught.value.hint)


def test_restarts_do_not_mix_generations(fake_torch: Path) -> None:
    """Values and exceptions are the last generation's."""

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


def answered(folder: Path, raised: object) -> None:
    """Leave the answer of rank 0 of generation 1, in which it was the only rank."""
    data = pickle.dumps((1, (0,), raised)) + pickle.dumps("mine")
    (folder / "0.pkl").write_bytes(data)


def test_values_are_those_of_the_last_generation(tmp_path: Path) -> None:
    """Which no restart began if the nodes have changed; a spare has none."""
    well = LaunchResult(exit_code=0, best_steps=(None, None), timings=Timings(began_ns=0))
    answered(tmp_path, None)

    assert read_values(str(tmp_path), replace(well, generation=1)) == ["mine"]
    assert read_values(str(tmp_path), well) == []
    with pytest.raises(meshrun.MeshrunError, match="every rank exited with code 0 before"):
        read_values(str(tmp_path), replace(well, generation=2))


@pytest.mark.parametrize(("generation", "kind"), [(1, WrongLossError), (2, meshrun.RankFailed)])
def test_an_exception_is_that_of_the_last_generation(
    generation: int, kind: type[Exception], tmp_path: Path
) -> None:
    """Not one of an earlier generation, if the last one failed outside the function."""
    raised = RankRaised(
        rank=0, kind="WrongLossError", message="7", traceback="", at_ns=1, shown=False
    )
    failure = RankFailure(
        rank=0, coordinate=(), label="", host="a", pid=7, exit_code=1, signum=None, at_ns=1,
        raised=raised, asked_to_end=False,
    )  # fmt: skip
    answered(tmp_path, ("Traceback ...", pickle_error(WrongLossError(7, 0.5))))
    failed = LaunchResult(
        exit_code=1, generation=generation, failures=(failure,), timings=Timings(began_ns=0)
    )

    with pytest.raises(kind):
        raise_failure(str(tmp_path), failed)
