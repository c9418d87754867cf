"""What ``%mesh`` and ``%%mesh`` print."""

import io
import linecache
import pickle
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from meshrun.api.notebook import _Cells, _Interrupted
from meshrun.api.remote_call import pickle_call
from meshrun.errors import UsageError
from meshrun.worker.cells import run_cell
from meshrun.worker.pickling import remember_source


@pytest.mark.parametrize(
    ("labels", "shown"), [(["dp0"], "dp=x: 1 rank\n"), (["dp0", "dp1"], "dp=x: 2 ranks\n")]
)
def test_ranks_are_counted(
    labels: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = _Cells(None)
    cells._group = SimpleNamespace(is_open=True, labels=labels)  # type: ignore[assignment]
    cells._words = ["dp=x"]
    cells.show("")

    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "%%mesh needs a mesh, as no ranks are running"),
        ("--device cpu", "%%mesh needs a mesh, found `--device cpu`"),
    ],
)
def test_a_cell_without_a_mesh(line: str, message: str) -> None:
    shell = SimpleNamespace(transform_cell=str)
    with pytest.raises(UsageError) as raised:
        _Cells(shell).run(line, "1")
    assert raised.value.message == message


def test_an_interrupt_while_ranks_start_shows_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshrun.api.worker_group.WorkerGroup", interrupt)
    with pytest.raises(_Interrupted):
        _Cells(SimpleNamespace(transform_cell=str)).run("dp=2", "1")


def test_the_last_line_of_a_cell_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 places its carets on that assumption."""
    monkeypatch.setenv("RANK", "0")
    assert run_cell("1\n2", "<cell test>") == "2"
    assert linecache.getlines("<cell test>") == ["1\n", "2\n"]


@pytest.mark.parametrize("cell", ["2 + 3", "get_ipython().system('true')\n2 + 3"])
def test_a_cell_may_follow_one_that_closed_stdout(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "stdout", closed)
    assert run_cell(cell, "<cell test>", hidden={0}) == "5"


def test_the_source_of_a_function_in_a_cell_goes_to_the_ranks() -> None:
    """For their tracebacks, as no file has it."""
    name, space = "/tmp/ipykernel_1/2.py", dict[str, Any]()
    remember_source(name, "f = lambda: 1 / 0  # fails")
    exec(compile("f = lambda: 1 / 0", name, "exec"), space)
    call = pickle_call(space["f"], (), {})
    del linecache.cache[name]
    function, args, kwargs = pickle.loads(call)

    assert (args, kwargs) == ((), {})
    with pytest.raises(ZeroDivisionError) as raised:
        function()
    assert "f = lambda: 1 / 0  # fails" in "".join(traceback.format_exception(raised.value))
