"""Dumps of faulthandler, parsed and merged."""

from __future__ import annotations

import faulthandler
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from meshrun.host import process_state
from meshrun.host.descriptors import unnamed_file
from meshrun.host.process_state import SignalState, handles_signal, read_stat, signal_state
from meshrun.host.processes import send_signal_to_main_thread, signals_blocked
from meshrun.host.reactor import Reactor
from meshrun.host.users_files import OURS
from meshrun.layout import solve_layout
from meshrun.protocol.stacks import (
    Frame,
    StackDump,
    describe,
    is_answered,
    lacks_main_thread,
    mark_answer,
    merge,
    parse_dump,
    stack_place,
    user_place,
)
from meshrun.supervisor import stack_requests
from meshrun.supervisor.rank_requests import RankPipes
from meshrun.supervisor.stack_requests import StackRequests
from meshrun.worker.stack_handler import keep_high
from tests.kit import wait_until


def dump_here() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode()


def test_the_main_thread_is_distinguished_from_the_others() -> None:
    """Frames are innermost first."""
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait, daemon=True)
    other.start()
    found = parse_dump(dump_here())
    waiting.set()
    other.join()

    assert found is not None
    assert [frame.function for frame in found.main[:2]] == [
        "dump_here", "test_the_main_thread_is_distinguished_from_the_others",
    ]  # fmt: skip
    assert any("wait" in stack[0].function for stack in found.others)
    assert found.fatal is None


@pytest.mark.parametrize("order", ["before", "within", "after"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_answer_and_the_handlers_dump_may_arrive_in_any_order(
    order: str, is_whole: bool
) -> None:
    """An answer with too many threads lacks the main one, which the handler has written."""
    thread = 'Thread 0x{} (most recent call first):\n  File "a.py", line {} in {}\n'
    dump = thread.format(2, 8, "load") + (thread.format(1, 3, "main") if is_whole else "...\n")
    answer = mark_answer(dump.encode()).decode()
    handlers = ['Stack (most recent call first):\n  File "a.py", li', "ne 2 in main\n"]
    text = "".join(
        {
            "before": [answer, *handlers],
            "within": [handlers[0], answer, handlers[1]],
            "after": [*handlers, answer],
        }[order]
    )

    main = Frame("a.py", "3" if is_whole else "2", "main")
    assert is_answered(text)
    assert not is_answered(text[: text.index(answer) + len(answer) - 1])
    assert lacks_main_thread(text) is not is_whole
    others = ((Frame("a.py", "8", "load"),),)
    assert parse_dump(text) == StackDump((main,), others, has_more=not is_whole)
    assert parse_dump("".join(handlers)) == StackDump((Frame("a.py", "2", "main"),))


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_a_crash_has_the_stack_of_the_thread_that_crashed(name: str, tmp_path: Path) -> None:
    """Even if it is not the main one."""
    program = tmp_path / "crash.py"
    program.write_text(
        "import faulthandler, os, signal, sys, threading\n"
        "faulthandler.enable(sys.stdout)\n"
        "def crash():\n"
        f"    signal.pthread_kill(threading.get_ident(), signal.{name})\n"
        "thread = threading.Thread(target=crash)\n"
        "thread.start(); thread.join()\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    found = parse_dump(ran.stdout)

    assert found is not None
    assert found.fatal
    assert found.main[0] == Frame(str(program), "4", "crash")


def test_text_that_is_not_a_dump() -> None:
    """Empty, or written by something else, perhaps to keep the launcher busy."""
    assert parse_dump("") is None
    assert parse_dump("Thread 0x" + "a" * 4_000_000) is None
    assert parse_dump('hello\n  File "a.py", line 3 in f\n') is None


def frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, str(line), function)


TORCH = os.path.join(os.sep, "env", "lib", "site-packages", "torch", "distributed")
FRAME = '  File "{}", line 1 in f'
RUNPY = "<frozen runpy>" if sys.version_info >= (3, 11) else runpy.__file__
IN_COLLECTIVE = (
    frame(f"{TORCH}/distributed_c10d.py", 3252, "all_reduce"),
    frame(f"{TORCH}/c10d_logger.py", 83, "wrapper"),
    frame("/home/me/train.py", 41, "step"),
    frame("/home/me/train.py", 60, "<module>"),
)


def test_a_stack_is_named_after_the_call_that_the_user_made() -> None:
    """Not after a decorator around it; paths are relative to the launch's folder."""
    assert stack_place(IN_COLLECTIVE, "/home/me") == "all_reduce at train.py:41"
    assert stack_place(IN_COLLECTIVE[2:], "/home/me") == "train.py:41 in step"
    assert stack_place(IN_COLLECTIVE[:2], "/home/me") == (
        "all_reduce at torch/distributed/distributed_c10d.py:3252"
    )
    assert stack_place(IN_COLLECTIVE[:2], "/env") == stack_place(IN_COLLECTIVE[:2], "/home/me")
    assert stack_place((), "/home/me") == "no Python frame"
    assert list(describe(IN_COLLECTIVE[1:], "/home")) == [
        "me/train.py:60 in <module>",
        "me/train.py:41 in step",
        "torch/distributed/c10d_logger.py:83 in wrapper",
    ]


@pytest.mark.parametrize("name", ["<cell 2>", "<stdin>"])
def test_a_cell_is_the_users_and_what_calls_it_is_not_shown(name: str) -> None:
    """Neither is what a rank does that waits for the next cell, or has finished."""
    torch = f"{TORCH}/distributed_c10d.py"
    callers = [*(f"{OURS[0]}worker/{file}.py" for file in ("cells", "serve_calls")), RUNPY]
    dumps = [
        parse_dump("\n".join(["Thread 0x1 (most recent call first):", *map(FRAME.format, files)]))
        for files in (
            [torch, name, *callers],
            [f"{OURS[0]}worker/call_channel.py", *callers],
            [f"{OURS[0]}worker/exit.py"] * 2,
        )
    ]
    shown = [(stack_place(dump.main, "/env"), len(dump.main)) for dump in dumps if dump is not None]

    assert shown == [(f"f at {name}:1", 2), ("between calls", 1), ("finished", 1)]


def test_an_import_is_reported_as_one() -> None:
    """In a traceback, which leaves out importlib's frames, and in a dump, which does not."""
    library = frame("/env/lib/site-packages/library/__init__.py", 7, "<module>")
    finds = [frame("<frozen importlib._bootstrap>", line, "_find_and_load") for line in (1, 2)]
    mine = frame("/home/me/train.py", 3, "<module>")
    assert stack_place((library, mine), "/home/me") == "import at train.py:3"
    assert stack_place((library, *finds, mine), "/home/me") == "import at train.py:3"
    assert stack_place((*finds, library), "/home/me") == "<module> at library/__init__.py:7"
    assert list(describe((*finds, library, *finds, mine), "/home/me")) == [
        "train.py:3 in <module>",
        "library/__init__.py:7 in <module>",
        "<frozen importlib._bootstrap>:1 in _find_and_load",
    ]


def test_a_breakpoint_is_reported_as_one() -> None:
    """Without pdb's frames above the prompt."""
    functions = ("cmd.py", "cmdloop"), ("pdb.py", "interaction"), ("bdb.py", "trace_dispatch")
    pdb = [frame(f"{os.__file__[:-5]}{file}", 1, function) for file, function in functions]
    stack = (*pdb, frame("/home/me/train.py", 3, "step"))

    assert stack_place(stack, "/home/me") == "breakpoint at train.py:3"
    assert list(describe(stack, "/home/me")) == ["train.py:3 in step", "cmd.py:1 in cmdloop"]


def test_deep_stacks_are_cut_at_their_outer_end() -> None:
    """A recursion of a thousand calls says nothing new."""
    lines = list(describe((frame("/a.py", 1, "f"),) * 1000, "/"))

    assert len(lines) < 50
    assert lines[0] == "... 960 more frames"


def test_equal_places_are_merged_the_most_common_first() -> None:
    """Only main threads are compared."""
    here, there = StackDump(IN_COLLECTIVE), StackDump(IN_COLLECTIVE[2:], others=(IN_COLLECTIVE,))
    merged = merge({3: here, 0: there, 1: here, 2: StackDump(IN_COLLECTIVE, others=((),))})

    assert [ranks for ranks, _ in merged] == [(1, 2, 3), (0,)]


def test_the_place_of_an_exception_is_in_the_users_file() -> None:
    """It is the innermost frame in the user's files, or "" if there is none."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 60, in <module>\n'
        "    step()\n"
        '  File "/home/me/train.py", line 41, in step\n'
        "    dist.all_reduce(x)\n"
        f'  File "{TORCH}/distributed_c10d.py", line 3252, in all_reduce\n'
        "RuntimeError: gone\n"
    )
    assert user_place(text, "/home/me") == "all_reduce at train.py:41"
    assert user_place(text.replace("train", "a\nb"), "/home/me") == r"all_reduce at a\nb.py:41"
    assert user_place(text.replace("train", 'a"b'), "/home/me") == 'all_reduce at a"b.py:41'
    assert user_place(text.replace("/home/me/", f"{TORCH}/"), "/home/me") == ""
    assert user_place("", "/") == ""


def test_a_call_outside_the_users_files_is_not_named(tmp_path: Path) -> None:
    """``os.environ["X"]`` calls ``__getitem__``; the user's own function says more."""
    program = tmp_path / "train.py"
    program.write_text(
        "import collections, json, os, traceback\n"
        "def read():\n"
        "    os.environ['NOT_SET']\n"
        "for line in [\n"
        "    lambda: os.environ['NOT_SET'],\n"
        "    read,\n"
        "    lambda: collections.Counter(5),\n"
        "    lambda: json.loads('x'),\n"
        "]:\n"
        "    try:\n"
        "        line()\n"
        "    except Exception:\n"
        "        print(traceback.format_exc(), end='----')\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    places = [user_place(text, str(tmp_path)) for text in ran.stdout.split("----")[:-1]]

    assert places == [
        "train.py:5 in <lambda>", "train.py:3 in read", "train.py:7 in <lambda>",
        "loads at train.py:8",
    ]  # fmt: skip


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought exception groups")
def test_the_place_of_an_exception_group_is_in_the_users_file(tmp_path: Path) -> None:
    """It is where the group was raised, not one of its parts."""
    program = tmp_path / "train.py"
    program.write_text(
        "def part():\n"
        "    raise ValueError\n"
        "try:\n"
        "    part()\n"
        "except ValueError as error:\n"
        "    part = error\n"
        "raise ExceptionGroup('several', [part])\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)

    assert f'File "{program}", line 2, in part' in ran.stderr
    assert user_place(ran.stderr, str(tmp_path)) == "train.py:7 in <module>"


@pytest.mark.parametrize(
    ("limit", "least"), [(200, 100), (1024, 500), (resource.RLIM_INFINITY, 500)]
)
def test_a_program_that_has_closed_all_descriptors_does_not_soon_get_ours(
    limit: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next request would write a stack to a file of the program."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    high = keep_high(os.open(os.devnull, os.O_RDONLY))
    os.close(high)
    assert high >= least


# ---- signals to processes ------------------------------------------------------------------

PROGRAM = """
import signal, sys
{setup}
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("setup", "state", "handled"),
    [
        ("", SignalState.UNHANDLED, False),
        ("signal.signal(signal.SIGUSR1, lambda *_: None)", SignalState.DONE, True),
        ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", SignalState.DONE, True),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
         SignalState.UNHANDLED, True),
    ],
)  # fmt: skip
def test_the_kernel_reports_what_a_process_does_with_a_signal(
    setup: str, state: SignalState, handled: bool
) -> None:
    """Before the signal is sent."""
    command = [sys.executable, "-c", PROGRAM.format(setup=setup)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert signal_state(process.pid, signal.SIGUSR1) is state
            assert handles_signal(process.pid, signal.SIGUSR1) is handled
            assert handles_signal(process.pid, signal.SIGWINCH)
            process.send_signal(signal.SIGSTOP)
            if state is SignalState.DONE:
                wait_until(
                    lambda: (
                        signal_state(process.pid, signal.SIGTRAP) is SignalState.UNHANDLED
                        and signal_state(process.pid, signal.SIGUSR1) is SignalState.STOPPED
                    ),
                    lambda: str(signal_state(process.pid, signal.SIGUSR1)),
                )
        finally:
            process.kill()
    assert signal_state(process.pid, signal.SIGUSR1) is SignalState.GONE


def test_a_signal_to_the_main_thread_goes_to_no_other() -> None:
    """One to the process does if the main thread blocks it, or has another one pending."""
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    with signals_blocked({signal.SIGUSR1}):
        send_signal_to_main_thread(os.getpid(), signal.SIGUSR1)
        assert signal.sigtimedwait({signal.SIGUSR1}, 0) is not None
    ends.set()
    other.join()


def test_a_process_whose_threads_end_meanwhile_is_not_gone() -> None:
    """As with a pool of threads, or an executor of many short tasks."""
    program = """import threading
while True:
    threads = [threading.Thread(target=print, args=("up",), kwargs={"flush": True}) for _ in "1234"]
    for run in (threading.Thread.start, threading.Thread.join):
        [*map(run, threads)]
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for _ in range(2000):
                process.stdout.readline()
                assert signal_state(process.pid, signal.SIGUSR1) is SignalState.UNHANDLED
        finally:
            process.kill()


@pytest.mark.parametrize("is_reported", [True, False])
def test_only_ranks_that_listen_are_asked(
    is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new fork still has the zygote's handler. gVisor reports no signals at all."""
    read_status = process_state.read_status

    def without_signals(path: str) -> dict[str, str]:
        return {
            name: value for name, value in read_status(path).items() if not name.startswith("Sig")
        }

    if not is_reported:
        monkeypatch.setattr(process_state, "read_status", without_signals)
    lines: list[str] = []
    reactor = Reactor()
    stacks = StackRequests(solve_layout(None, nproc_per_node=2), reactor, RankPipes(), lines.extend)
    code = (
        "import sys, time\nfrom meshrun.worker.stack_handler import enable_stack_dumps\n"
        "enable_stack_dumps(int(sys.argv[1])); print('up', flush=True); time.sleep(100)\n"
    )
    ranks = []
    elsewhere = unnamed_file("the zygote's")
    for rank in range(2):
        fd = stacks.open(rank)
        if rank == 1:
            os.dup2(elsewhere, fd)
        command = [sys.executable, "-c", code, str(fd)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[fd]))
        os.close(fd)
    try:
        for each in ranks:
            assert each.stdout is not None
            each.stdout.readline()
        if not is_reported:
            assert signal_state(ranks[0].pid, signal.SIGUSR1) is SignalState.UNKNOWN
            assert handles_signal(ranks[0].pid, signal.SIGUSR1)
        stacks.ask({rank: each.pid for rank, each in enumerate(ranks)})
        while not lines:
            reactor.turn()
        assert [each.poll() for each in ranks] == [None, None]
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
        stacks.close()
        reactor.close()
        os.close(elsewhere)

    assert lines[0] == "rank 0: <module> at <string>:3"
    assert any("rank 1: is not running Python started by meshrun" in line for line in lines)


@pytest.mark.parametrize(
    ("waits", "in_c"),
    [
        ("while True: pass", False),
        ("time.sleep(100)", False),
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", True),
    ],
)
def test_the_handler_in_c_is_asked_only_while_no_python_runs(waits: str, in_c: bool) -> None:
    """It follows frames, which change while Python runs."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from meshrun.protocol.stacks import MAIN_STACK_SIGNAL\n"
        "from meshrun.worker.stack_handler import enable_stack_dumps\n"
        "fd = enable_stack_dumps(int(sys.argv[1]))\n"
        "def begin():\n"
        "    print('up', flush=True)\n"
        f"    {waits}\n"
        "begin()"
    )
    lines: list[str] = []
    reactor = Reactor()
    stacks = StackRequests(solve_layout(None, nproc_per_node=1), reactor, RankPipes(), lines.extend)
    fd = stacks.open(0)
    rank = subprocess.Popen(
        [sys.executable, "-c", code, str(fd)], stdout=subprocess.PIPE, pass_fds=[fd]
    )
    os.close(fd)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        if waits != "while True: pass":
            wait_until(lambda: read_stat(rank.pid)[0] == "S", lambda: "the process does not sleep")
        stacks.ask({0: rank.pid})
        reactor.run_until(lambda: bool(lines))
        has_answered = is_answered(stacks._text(0, 0))
    finally:
        rank.kill()
        rank.communicate()
        stacks.close()
        reactor.close()
    assert lines[0].startswith("rank 0: begin at <string>:")
    assert has_answered is not in_c


def test_native_stacks_of_all_ranks_are_shown_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as py-spy has printed them in time."""
    ranks = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    slow, fast = (each.pid for each in ranks)
    native = tmp_path / "py-spy"
    native.write_text(f'#!/bin/sh\necho "Process $4"\n[ $4 = {slow} ] && exec sleep 100\n')
    native.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(stack_requests, "_NATIVE_TAKES_S", 0.5)
    shown: list[list[str]] = []
    reactor = Reactor()
    stacks = StackRequests(solve_layout(None, nproc_per_node=2), reactor, RankPipes(), shown.append)
    try:
        stacks.ask({0: slow, 1: fast})
        reactor.run_until(lambda: not stacks.is_under_way)
        assert shown[1:] == [[f"Process {slow}", f"Process {fast}"]]
    finally:
        stacks.close()
        reactor.close()
        for each in ranks:
            each.kill()
            each.wait()
