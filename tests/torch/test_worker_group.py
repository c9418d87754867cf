"""WorkerGroup: ranks keep their state between calls, and a closed group leaves nothing behind."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import meshrun
from meshrun.api import child_launcher, worker_group
from meshrun.api.remote_call import RankTraceback
from meshrun.api.worker_group import GroupLost, WorkerGroup
from meshrun.errors import UsageError
from meshrun.host.processes import signals_blocked
from meshrun.worker.call_channel import Channel
from tests.kit import NONE_STARTED, wait_until
from tests.variations import ordinary

pytestmark = pytest.mark.torch


def total(each: float) -> float:
    import torch
    import torch.distributed as dist

    mine = torch.tensor([each * dist.get_rank()])
    dist.all_reduce(mine)
    return mine.item()


def end_on(which: int, how: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == which or which < 0:
        if how == "exit":
            os._exit(3)
        raise {"raise": ValueError, "leave": SystemExit}[how](f"I am {dist.get_rank()}")
    dist.barrier()


def interrupt(signum: int = signal.SIGINT) -> None:
    """Rank 0 interrupts the caller once all ranks have started the call."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(int(os.environ["CALLER"]), signum)
    while True:
        time.sleep(0.01)


def interrupt_early() -> None:
    """Rank 0 interrupts the caller while rank 1 is stopped; when interrupted, it resumes rank 1."""
    is_first = os.environ["RANK"] == "0"
    try:
        if is_first:
            os.kill(int(os.environ["CALLER"]), signal.SIGINT)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        if is_first:
            os.kill(builtins.other, signal.SIGCONT)  # type: ignore[attr-defined]
        raise


def interrupt_in_a_callback() -> None:
    """Rank 0 interrupts the caller where Python drops KeyboardInterrupt: in a weak reference's."""

    def call(_: object) -> None:
        if os.environ["RANK"] == "0":
            os.kill(int(os.environ["CALLER"]), signal.SIGINT)
        while True:
            time.sleep(0.01)

    value = threading.Event()
    _kept = weakref.ref(value, call)
    del value
    while True:
        time.sleep(0.01)


@pytest.fixture
def interruptible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt here, and give ranks this process's id."""
    monkeypatch.setenv("CALLER", str(os.getpid()))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_call_is_interrupted_whenever_ctrl_c_comes(interruptible: None) -> None:
    """Before a rank has started the call, or where Python drops the exception; the rank lives."""

    def keep(pid: int) -> None:
        builtins.other = pid  # type: ignore[attr-defined]

    with WorkerGroup(nproc_per_node=2, device="cpu") as group:
        other = group.members[1].pid
        group.call(keep, other)
        for _ in range(3):
            os.kill(other, signal.SIGSTOP)
            with pytest.raises(KeyboardInterrupt):
                group.call(interrupt_early)
            assert group.call(os.getpid)[1] == other
        with pytest.raises(KeyboardInterrupt):
            group.call(interrupt_in_a_callback)
        assert group.call(os.getpid)[1] == other


def test_all_ranks_run_calls_and_keep_their_state(interruptible: None) -> None:
    """Values come in the order of ranks, output before the call returns, and one error is raised.

    Ctrl-C ends only the call, on all ranks; so does an exception of any signal handler.
    """

    def give_up(*_: object) -> None:
        raise TimeoutError

    out, err = io.StringIO(), io.StringIO()
    here: dict[str, Any] = {"count": 0}

    def add() -> int:
        builtins.kept = getattr(builtins, "kept", 0) + 1  # type: ignore[attr-defined]
        here["count"] += 1
        print("kept", builtins.kept, end="")  # type: ignore[attr-defined]
        return int(builtins.kept)  # type: ignore[attr-defined]

    with WorkerGroup(mesh="dp=2", device="cpu", stdout=out, stderr=err) as group:
        assert group.call(lambda: str(meshrun.current_mesh("dp").get_local_rank())) == ["0", "1"]
        assert group.call(total, 2.0) == [2.0, 2.0]
        assert group.call(dict, function=1, self=2) == [{"function": 1, "self": 2}] * 2
        assert [group.call(add), group.call(add)] == [[1, 1], [2, 2]]
        lines = sorted(out.getvalue().splitlines())
        assert lines == [f"[dp{rank}] kept {n}" for rank in (0, 1) for n in (1, 2)]
        with pytest.raises(ValueError, match="I am") as caught:
            group.call(end_on, -1, "raise")
        assert isinstance(caught.value.__cause__, RankTraceback)
        assert "in end_on" in caught.value.__cause__.text
        with pytest.raises(SystemExit):
            group.call(end_on, -1, "leave")
        with pytest.raises(meshrun.MeshrunError, match="cannot pickle"):
            group.call(print, threading.Lock())
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                group.call(interrupt)
        before = signal.signal(signal.SIGUSR1, give_up)
        with pytest.raises(TimeoutError):
            group.call(interrupt, signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)
        for member in group.members:
            os.kill(member.pid, signal.SIGINT)  # for a call that has ended
        assert group.call(add) == [3, 3]

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert here["count"] == 0
    assert err.getvalue() == ""
    with pytest.raises(GroupLost):
        group.call(add)


def test_a_signal_handler_may_raise_at_any_moment(
    fake_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the call in progress as a whole: the next call gets its own answer.

    A signal that the program blocks stays blocked.
    """

    def give_up(*_: object) -> None:
        raise TimeoutError

    def raise_in(owner: object, name: str) -> None:
        do = getattr(owner, name)

        def interrupted(*args: Any) -> Any:
            monkeypatch.setattr(owner, name, do)
            os.kill(os.getpid(), signal.SIGUSR1)
            return do(*args)

        monkeypatch.setattr(owner, name, interrupted)

    monkeypatch.setattr(child_launcher, "_OUTPUT_S", 3600)
    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with WorkerGroup(nproc_per_node=1, options=["--prefix=none"]) as group:
            moments = (worker_group, "Exchange"), (Channel, "send_now"), (Channel, "receive_now")
            for owner, name in moments:
                raise_in(owner, name)
                with pytest.raises(TimeoutError):
                    group.call(time.sleep, 0)
                assert group.call(int, "7") == [7]
            with signals_blocked({signal.SIGUSR1}):
                assert group.call(int, "7") == [7]
                assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            signal.signal(signal.SIGUSR1, lambda *_: group.call(int, "8"))
            raise_in(Channel, "send_now")
            with pytest.raises(UsageError, match="a signal handler called these workers"):
                group.call(int, "7")
            assert group.call(int, "7") == [7]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_streams_of_any_kind_do_not_block_ranks(fake_torch: Path) -> None:
    """One that cannot encode a character, one with only write(), a closed one, and none at all."""
    closed, narrow, written = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii"), list[str]()
    closed.close()
    streams = [SimpleNamespace(write=written.append), narrow, closed, None]

    def much() -> int:
        for _ in range(2000):
            print("é" * 100)
        return 3

    with WorkerGroup(nproc_per_node=1, options=["--prefix=none"]) as group:
        for stream in streams:
            with contextlib.redirect_stdout(cast(Any, stream)):
                assert group.call(much) == [3]
    narrow.seek(0)

    assert "".join(written) == ("é" * 100 + "\n") * 2000
    assert narrow.read() == ("\\xe9" * 100 + "\n") * 2000


def say() -> None:
    print("whole", flush=True)
    print("a part", end="")


@pytest.mark.parametrize(
    ("options", "expected"),
    ordinary([
        ([], ["[rank 0] a part", "[rank 0] whole", "[rank 1] a part", "[rank 1] whole"]),
        (["--hide", "rank=1"], ["[rank 0] a part", "[rank 0] whole"]),
        (["--redirects", "3"], []),
        (["--tee", "3", "--prefix", "none"], ["a part", "a part", "whole", "whole"]),
        (
            ["--log-line-prefix-template", "${rank}>"],
            ["0>a part", "0>whole", "1>a part", "1>whole"],
        ),
        (["--collapse"], ["[all x2] a part", "[all x2] whole"]),
    ], ["--hide", "rank=1"], ["--redirects", "3"]),
    ids=["plain", "hide", "redirects", "tee", "template", "collapse"],
)  # fmt: skip
def test_the_output_of_a_call_comes_before_its_value(
    options: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_torch: Path,
) -> None:
    """Wherever it goes: a call does not wait for output that is not shown."""
    monkeypatch.setattr(child_launcher, "_OUTPUT_S", 3600.0)
    out, logs = io.StringIO(), ["--log-dir", str(tmp_path / "logs")]
    with WorkerGroup(nproc_per_node=2, stdout=out, options=[*options, *logs]) as group:
        for number in (1, 2):
            group.call(say)
            assert sorted(out.getvalue().splitlines()) == sorted(expected * number)

    files = list((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert {file.read_text() for file in files} <= {"whole\na part" * 2}


def test_output_of_a_call_as_json_lines(fake_torch: Path) -> None:
    """There are only lines of the ranks."""
    out = io.StringIO()
    with WorkerGroup(nproc_per_node=2, stdout=out, options=["--log-format", "json"]) as group:
        group.call(say)

    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert sorted((line["rank"], line["message"]) for line in lines) == [
        (rank, text) for rank in (0, 1) for text in ("a part", "whole")
    ]


def test_variables_of_a_job_do_not_apply_to_a_group(
    monkeypatch: pytest.MonkeyPatch, fake_torch: Path
) -> None:
    """A group runs on this machine, and has its own program."""
    for name, value in {
        "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "192.0.2.1",
        "PET_RDZV_ENDPOINT": "192.0.2.1:29500", "MESHRUN_HOSTS": "nowhere,elsewhere",
        "PET_RUN_PATH": "1", "PET_NO_PYTHON": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0", "SLURM_NODELIST": "nowhere,elsewhere",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with WorkerGroup(nproc_per_node=2) as group:
        assert group.call(os.getppid)


def fail_with_three_lines() -> None:
    raise ValueError(f"first of {os.environ['RANK']}\nsecond\nthird")


def test_errors_of_other_ranks_take_one_line_each(fake_torch: Path) -> None:
    """The type, and the first line of the message."""
    with (
        WorkerGroup(nproc_per_node=2) as group,
        pytest.raises(ValueError, match="first of") as caught,
    ):
        group.call(fail_with_three_lines)
    assert isinstance(caught.value.__cause__, RankTraceback)
    lines = caught.value.__cause__.text.splitlines()
    first = "first of 0" in lines[-2] or "first of 0" in "\n".join(lines[:-1])
    assert lines[-1] == f"rank {int(first)}: ValueError: first of {int(first)}"


def test_the_error_of_a_group_that_cannot_start(fake_torch: Path) -> None:
    """It gives the reason, even if the zygote found it."""
    with pytest.raises(meshrun.MeshrunError, match="no_such_module"):
        WorkerGroup(nproc_per_node=1, preload=["no_such_module"])


def test_a_rank_that_is_killed_before_it_introduces_itself(
    fake_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hears why, although the rank had connected."""
    (tmp_path / "doomed.py").write_text(
        "import os\n"
        "from meshrun.worker import call_channel\n"
        "connect = call_channel.connect_in\n"
        "call_channel.connect_in = lambda folder: (connect(folder), os.kill(os.getpid(), 9))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    with pytest.raises(meshrun.RankFailed, match="rank 0 was killed by SIGKILL, exit code 137"):
        WorkerGroup(nproc_per_node=1, preload="doomed")


class Secretive:
    """Has no repr, and can be pickled only until it is unpickled."""

    def __repr__(self) -> str:
        raise ValueError

    def __setstate__(self, _: object) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> bool:
        return not self.__dict__ or self.lock  # type: ignore[return-value]


def fail_with(what: object) -> None:
    raise ValueError(what)


def test_a_rank_that_exits_with_0_in_a_call_has_no_value(fake_torch: Path) -> None:
    """The caller gets an error instead of a SystemExit that would look like success."""
    with WorkerGroup(nproc_per_node=1) as group:
        for code in (0, None):
            with pytest.raises(meshrun.MeshrunError, match="a rank exited with code 0 before"):
                group.call(sys.exit, code)
        with pytest.raises(SystemExit, match="3"):
            group.call(sys.exit, 3)
        with pytest.raises(UsageError, match="timeout must be a number, found '5'"):
            group.call(abs, 3, timeout="5")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"timeout must be .*, found `inf`"):
            group.call(abs, 3, timeout=float("inf"))
        with pytest.raises(meshrun.MeshrunError, match=r"raised ValueError: \(no message"):
            group.call(fail_with, Secretive())
        with pytest.raises(TypeError, match=r"pickle the _thread\.lock that rank 0 return"):
            group.call(threading.Lock)
        assert group.call(int, "7") == [7]


def fail_at_its_end(error: Exception | None = None) -> None:
    with WorkerGroup(nproc_per_node=1, stderr=io.StringIO()) as group:
        group.call(atexit.register, os._exit, 3)
        if error is not None:
            raise error


def test_a_rank_that_fails_at_its_end(fake_torch: Path) -> None:
    """Closing its group raises that."""
    with pytest.raises(meshrun.RankFailed, match="rank 0 failed, exit code 3"):
        fail_at_its_end()


@pytest.mark.nightly
def test_ranks_that_end_late_or_fail_after_an_error(fake_torch: Path) -> None:
    """Ranks that take too long are an error too, but none replaces an exception of the block."""
    with pytest.raises(KeyError):
        fail_at_its_end(KeyError())
    group = WorkerGroup(nproc_per_node=1, stderr=io.StringIO())
    group.call(atexit.register, time.sleep, 100)
    assert isinstance(group.end(0.1), meshrun.GroupLost)


def test_a_group_works_in_all_threads_of_its_process_and_in_no_fork() -> None:
    """Each call gets its own values; closing the group ends a call in progress.

    The thread that has started the group may end, and a fork may outlive it.
    """
    err = io.StringIO()
    found: dict[int, object] = {}

    def ask(number: int) -> None:
        found[number] = [group.call(abs, number) for _ in range(20)]

    def wait_long() -> None:
        with pytest.raises(GroupLost, match="closed during the call") as caught:
            group.call(wait_on_rank_1)
        found[-1] = caught.value

    def make() -> None:
        made.append(WorkerGroup(mesh="dp=2", device="cpu", stderr=err))

    made: list[WorkerGroup] = []
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    with made[0] as group:
        group.call(os.environ.clear)
        threads = [threading.Thread(target=ask, args=[number]) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: [[number] * 2] * 20 for number in (1, 2)}
        assert group.call(abs, 4) == [4, 4]
        waits = threading.Thread(target=wait_long)
        waits.start()
        wait_until(lambda: group._calling_thread is not None, lambda: "a call in progress")
        may_exit, let_exit = os.pipe()
        if (child := os.fork()) == 0:
            with contextlib.suppress(GroupLost):
                group.call(abs, 3)
                os._exit(1)
            group.close()
            os.read(may_exit, 1)
            os._exit(0)
        group.close()
        waits.join()
        os.write(let_exit, b".")
        assert os.waitpid(child, 0)[1] == 0
    for end in (may_exit, let_exit):
        os.close(end)
    assert isinstance(found[-1], GroupLost)
    assert err.getvalue() == ""


@pytest.mark.nightly
def test_a_group_that_is_forgotten_ends(fake_torch: Path) -> None:
    """As its ranks may hold much memory."""
    group = WorkerGroup(nproc_per_node=1)
    folder = group._folder
    with pytest.warns(ResourceWarning, match=r"unclosed .*socket"):
        del group
    wait_until(lambda: not os.path.exists(folder), lambda: f"the removal of {folder}")


def wait_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(1)


@pytest.mark.parametrize("how", ordinary(["raise", "exit"], "exit"))
def test_a_rank_that_fails_alone_ends_the_group(how: str) -> None:
    """As the others wait for it; the error shows where they are."""
    with WorkerGroup(mesh="dp=2", device="cpu", stderr=io.StringIO()) as group:
        with pytest.raises(ValueError if how == "raise" else meshrun.RankFailed) as caught:
            group.call(end_on, 1, how)
        if how == "raise":
            cause = str(caught.value.__cause__)
            assert "dp1, pid" in cause
            assert "dp1 failed; not finished: dp0" in cause
            assert "barrier at" in cause
            assert "rank 1: between calls" in cause
        else:
            assert isinstance(caught.value, meshrun.RankFailed)
            assert caught.value.exit_code == 3
        assert not group.is_open


def test_a_start_that_is_interrupted_leaves_nothing(
    interruptible: None, fake_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the launcher has just been forked."""
    forked: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            forked.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerGroup(nproc_per_node=1)
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_a_call_that_takes_too_long_ends_the_group() -> None:
    with (
        WorkerGroup(nproc_per_node=1, device="cpu", stderr=io.StringIO()) as group,
        pytest.raises(GroupLost, match=r"timed out after 0\.5 s; not finished: rank 0"),
    ):
        group.call(time.sleep, 600, timeout=0.5)


def test_a_group_that_cannot_start_raises_at_once() -> None:
    with pytest.raises(meshrun.MeshrunError, match="dp=3"):
        WorkerGroup(mesh="dp=3", nproc_per_node=2, device="cpu", stderr=io.StringIO())
    with pytest.raises(meshrun.MeshrunError, match=NONE_STARTED):
        WorkerGroup(mesh="dp=2", options=["--dry-run"], stdout=io.StringIO())
    for words in (["--nnodes", "2"], ["--hosts", "a,b"]):
        with pytest.raises(UsageError, match="--standalone"):
            WorkerGroup(mesh="dp=2", options=words)
