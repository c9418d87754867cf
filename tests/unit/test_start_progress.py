"""Notes about a launch: slow imports, signals, changes of nodes, and processes that remain."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from msgspec.structs import replace

from meshrun.console.console import Console
from meshrun.host.reactor import Reactor
from meshrun.lifecycle.phases import NodesPhase, Phase, Stop
from meshrun.lifecycle.state import NodesState, State
from meshrun.plan.plan import complete_plan
from meshrun.protocol.events import (
    AllJoined,
    GenerationAborted,
    LaunchBegan,
    SignalArrived,
    TimePassed,
)
from meshrun.protocol.generation import Cause, RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import Resize
from meshrun.protocol.zygote_messages import GenerationEnded, LeftoversEnded
from meshrun.report import progress
from meshrun.report.progress import StartProgress, describe_resize
from tests.kit import LEFT_BEHIND, LOST_PEER, NONE_STARTED, lost_node
from tests.plans import plan_of

NOT_YET = {0: RankState()}
READY = {0: RankState(pid=7, joined=True, ready_ns=1)}
EXITED = RankExited(rank=1, pid=8, wait_status=0, at_ns=1)
_HELD = """
import os
import socket
import subprocess
import sys
from meshrun.host import processes
from meshrun.warm import shim

BECOME_GUARD = '''
import time
from meshrun.host.processes import become_guard
become_guard()
print("guards", flush=True)
time.sleep(600)
'''
held = subprocess.Popen(["sleep", "600"])
guard = subprocess.Popen([sys.executable, "-c", BECOME_GUARD], stdout=subprocess.PIPE)
guard.stdout.readline()
send_signal = processes.send_signal
# as if the kernel held it
processes.send_signal = lambda pid, signum: pid == held.pid or send_signal(pid, signum)
processes._KILL_TAKES_S = 0.5  # what is not held ends within it on a busy machine, too
"""
_END = """
ended = processes.end_children(grace_s=0.0)
print(ended.killed, ended.count, ended.survivors == (held.pid,), guard.wait())
held.kill()
"""
_FOLLOW = """
from meshrun.host.reactor import Reactor
reactor, ended, turns = Reactor(), [], []
reactor.follow(processes.killing_children(frozenset), ended.append)
reactor.every(0.005, lambda: turns.append(1))
reactor.run_until(lambda: ended)
print(ended[0].survivors == (held.pid,), len(turns) > 1)
held.kill()
"""
_KEEP = """
shim._send = lambda *_: setattr(processes, "_KILL_TAKES_S", 600.0)
ours, launcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
launcher.send(b"!")  # it is alive
zygote = subprocess.Popen(["true"])
shim._keep(ours, zygote.pid, os.pidfd_open(zygote.pid))
print(held.poll())
held.kill()
"""


def test_imports_that_take_long_are_noted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while they do; with the modules that are preloaded."""
    monkeypatch.setattr(progress, "_IMPORT_TAKES_S", 0.0)
    for phase in (Phase.IMPORTING, Phase.RUNNING):
        watch = StartProgress(plan_of(preload=["slow"]), Console())
        with Reactor() as reactor:
            watch.begin(reactor, State(shutdown_timeout_s=1.0, ranks={}, phase=phase))
            reactor.turn(most_s=0)

    assert capfd.readouterr().err == (
        "meshrun: importing torch and slow has taken 0 s; Ctrl-\\ shows where it is\n"
    )


def test_imports_of_another_zygote_are_noted_after_the_same_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not after the time since the launch began; also if that is much longer."""
    now_s = 0.0
    state = State(shutdown_timeout_s=1.0, ranks={}, phase=Phase.IMPORTING)
    with Reactor(clock_ns=lambda: int(now_s * 1e9)) as reactor:
        (watch := StartProgress(plan_of(), Console())).begin(reactor, state)
        noted = []
        for at_s, phase in (50, Phase.RUNNING), (55, Phase.IMPORTING), (100, None), (120, None):
            now_s = at_s
            if phase is not None:
                watch.on_event(TimePassed(at_ns=0), replace(state, phase=phase))
            reactor.turn(most_s=0)
            noted.append("importing torch has taken 60 s" in capfd.readouterr().err)

    assert noted == [False, False, False, True]


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        ([RankState()], NONE_STARTED),
        ([RankState(pid=8, exited=EXITED)], "all ranks have exited"),
        ([RankState(pid=7), RankState(pid=8)], "stopping 2 ranks, up to 1 s"),
        ([RankState(pid=7), RankState()], "stopping 2 ranks, up to 1 s"),
        ([RankState(pid=7), RankState(pid=8, exited=EXITED)], "stopping 1 rank, up to 1 s"),
    ],
    ids=["before the first", "after the last", "all", "one not reported yet", "one exited"],
)
def test_how_many_ranks_a_signal_stops(
    capfd: pytest.CaptureFixture[str], ranks: list[RankState], note: str
) -> None:
    """Ranks are forked together, and reported one after the other."""
    state = State(shutdown_timeout_s=1.0, ranks=dict(enumerate(ranks)), stop=Stop.ASKED)
    StartProgress(plan_of(), Console()).on_event(SignalArrived(signum=15, at_ns=1), state)

    assert capfd.readouterr().err.splitlines() == [f"meshrun: SIGTERM: {note}"]


def test_a_lost_connection_is_explained_by_the_lost_node(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its peers may notice first; an elastic launch goes on without another report."""
    lost = RankRaised(
        rank=0, at_ns=1, kind="DistNetworkError", shown=False, traceback="",
        message="Connection closed by peer",
    )  # fmt: skip
    node = GenerationAborted(why=f"{lost_node(1, 'b')}killed", signum=0, at_ns=2, resizes=True)
    state = State(shutdown_timeout_s=1.0, ranks=READY, stop=Stop.ASKED)
    watch = StartProgress(plan_of(), Console())
    for event in (lost, node):
        watch.on_event(event, state)

    assert capfd.readouterr().err.splitlines() == [
        f"meshrun: rank 0 {LOST_PEER}",
        f"meshrun: {lost_node(1, 'b')}killed",
    ]


def change(generation: int, lost: str, shapes: str) -> Cause:
    """Return the loss of a node, and the resize that followed."""
    resize = Resize(
        generation=generation, left=(lost,), joined=(), shapes=shapes, mesh="", hosts=("node0",)
    )
    return Cause(
        rank=None, description=f"{lost} was lost", raised=None, ran_s=None,
        at_ns=time.monotonic_ns(), is_failure=False, resize=resize,
    )  # fmt: skip


def all_joined(*causes: Cause) -> AllJoined:
    """Return the event that all nodes have joined."""
    return AllJoined(
        node_rank=0, hosts=("node0",), nproc_per_node=(1,), run_id="j", store_address="node0",
        store_port=1, own_address="node0", at_ns=1, causes=tuple({} for _ in causes),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("left", "joined", "who"),
    [
        (("a", "b"), ("c",), "without a, b and with c"),
        (("a", "b"), ("b", "a"), "with b, a again"),  # cut off for a moment
        (("a", "b"), ("b", "c"), "without a and with c and with b again"),
    ],
)
def test_a_node_that_has_left_and_joined_is_back(
    left: tuple[str, ...], joined: tuple[str, ...], who: str
) -> None:
    """It is not named twice."""
    resize = Resize(generation=1, left=left, joined=joined, shapes="dp 3", mesh="", hosts=())

    assert describe_resize(resize) == f"generation 1 runs {who}: dp 3"


@pytest.mark.parametrize("has_run", [False, True])
def test_every_change_is_reported_once(has_run: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Once its ranks run, or once the next change follows, if that is earlier."""
    watch = StartProgress(plan_of(), Console())
    first, second = change(1, "node1", "dp 3 -> 2"), change(2, "node2", "dp 2 -> 1")
    state = State(shutdown_timeout_s=1.0, ranks=READY, nodes=NodesState(phase=NodesPhase.RUNNING))
    watch.on_event(all_joined(), state)
    state = replace(state, ranks=NOT_YET, causes=(first,))
    watch.on_event(all_joined(first), state)
    if has_run:
        watch.on_event(TimePassed(at_ns=1), replace(state, ranks=READY))
    state = replace(state, ranks=NOT_YET, causes=(first, second))
    watch.on_event(all_joined(first, second), state)
    watch.on_event(TimePassed(at_ns=1), replace(state, ranks=READY))
    lines = capfd.readouterr().err.splitlines()

    how = "runs" if has_run else "started"
    assert lines[0].startswith(f"meshrun: generation 1 {how} without node1: dp 3 -> 2")
    assert lines[1].startswith("meshrun: generation 2 runs without node2: dp 2 -> 1; it took ")
    assert len(lines) == 2


def test_the_rank_of_an_excluded_node_need_not_be_in_the_new_layout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The cause of the restart is rank 2 of 3, and one rank is left."""
    watch = StartProgress(plan_of(mesh="dp=1", device="cpu"), Console())
    fewer = change(1, "node2", "dp 3 -> 1")
    cause = replace(fewer, rank=2, description="exited with code 3", is_failure=True)
    nodes = NodesState(phase=NodesPhase.RUNNING)
    state = State(shutdown_timeout_s=1.0, ranks=NOT_YET, nodes=nodes, max_restarts=1)
    watch.on_event(all_joined(cause), replace(state, causes=(cause,)))

    restart = "meshrun: restart 1 of 1, because rank 2 exited with code 3"
    assert capfd.readouterr().err.splitlines() == [restart]


@pytest.mark.parametrize("node_rank", [0, 1])
def test_spare_workers_are_reported_once_nodes_have_joined(
    node_rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """By node 0 alone, and again if their number changes."""
    plan = plan_of(
        nnodes="2", nproc_per_node="3", mesh="dp=-1,tp=2", device="cpu", rdzv_endpoint="node0:1"
    )
    watch = StartProgress(plan, Console())
    state = State(shutdown_timeout_s=1.0, ranks=NOT_YET, nodes=NodesState())
    watch.on_event(LaunchBegan(at_ns=1), state)
    for workers in ((2, 3), (2, 3), (2, 2), (3, 4)):
        settled = complete_plan(plan, node_rank=node_rank, nproc_per_node=workers)
        watch.update_plan(settled)
        watch.on_event(all_joined(), replace(state, nodes=NodesState(phase=NodesPhase.RUNNING)))
    lines = [line for line in capfd.readouterr().err.splitlines() if "spare" in line]

    of_five, of_seven = (f"meshrun: 1 of {n} workers is spare: node 1 has 1" for n in (5, 7))
    assert lines == ([] if node_rank else [of_five, of_seven])


def run_python(code: str) -> str:
    """Return what a Python program prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_what_survives_sigkill_is_returned() -> None:
    """After a limited wait; a guard, whose turn would come after it, is ended nevertheless."""
    assert run_python(_HELD + _END) == "0 1 True -9\n"
    assert run_python(_HELD + _FOLLOW) == "True True\n"


def test_a_shim_waits_once_for_what_survives_sigkill() -> None:
    """Then it ends the guard, which would share the port with the next store."""
    assert run_python(_HELD + _KEEP) == "None\n"


def test_each_generation_whose_ranks_are_killed_is_noted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not only the first one that exceeds the shutdown timeout."""
    watch = StartProgress(plan_of(), Console())
    for causes in ((), (Cause(description="a rank failed", at_ns=1),)):
        state = State(shutdown_timeout_s=1.0, ranks={0: RankState(pid=7)}, causes=causes)
        watch.on_event(GenerationEnded(at_ns=1), state)
        for stop in (Stop.ASKED, Stop.KILLED):
            watch.on_event(TimePassed(at_ns=1), replace(state, stop=stop))
    killing = "meshrun: timed out after 1 s: 0 of 1 rank exited; killing rank 0"

    assert capfd.readouterr().err.splitlines().count(killing) == 2


def test_survivors_are_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Even if a second event names one again."""
    state = State(shutdown_timeout_s=1.0, ranks={0: RankState()})
    watch = StartProgress(plan_of(), Console())
    watch.on_event(LeftoversEnded(count=2, survivors=[7, 5]), state)
    watch.on_event(LeftoversEnded(count=0, survivors=[5, 9]), state)
    lines = capfd.readouterr().err.splitlines()

    assert lines[0] == f"meshrun: killed 2 processes {LEFT_BEHIND}"
    assert lines[1].startswith("meshrun: processes 5, 7 survived SIGKILL: ")
    assert lines[2].startswith("meshrun: process 9 survived SIGKILL")
    assert len(lines) == 3
