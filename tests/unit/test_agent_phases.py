"""An agent that reads its controller's orders from a pipe, and whose launcher is played."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun import __version__
from meshrun.host.reactor import Reactor
from meshrun.protocol.packing import pack, unpack
from meshrun.ssh import agent
from meshrun.ssh.agent_messages import (
    Alive,
    FrameSplitter,
    FromAgent,
    Hello,
    Listen,
    SignalLauncher,
    StartLauncher,
    StopLauncher,
)
from meshrun.ssh.host_phases import AgentPhase
from tests.diagrams import check_phases, unseen

ORDERS = {
    "listen": Listen(addresses=["127.0.0.1"]),
    "start": StartLauncher(words=[], env={}, listens=True),
    "signal": SignalLauncher(signum=signal.SIGINT, even_if_joined=True),
    "stop": StopLauncher(why="the launch has ended", even_if_joined=True),
    "stop unless joined": StopLauncher(why="the launch has ended", even_if_joined=False),
}
GONE = "the controller is gone"
HIT = "start, and SIGTERM meanwhile"
EVENTS = (
    "start",
    HIT,
    "signal",
    "stop",
    "stop unless joined",
    "SIGTERM",
    "silence",
    "the launcher exits",
    GONE,
)


class PlayedLauncher:
    """A launcher that exits when it is told to in a test, or if it is killed."""

    pid, stdout, stderr = 0, None, None

    def __init__(self, *_: object, **__: object) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, if it has exited."""
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        self.returncode = -signal.SIGKILL


class Played:
    """An agent, and what happens to it in each turn; then the controller is gone."""

    def __init__(self, patch: pytest.MonkeyPatch, events: Sequence[str], cwd: str) -> None:
        self._events, self.signals = list(events), list[int]()
        self._now_s = 1000.0
        self._launcher: PlayedLauncher | None = None
        self._wait = Reactor.wait
        patch.setattr(agent, "Reactor", partial(Reactor, clock_ns=lambda: int(self._now_s * 1e9)))
        patch.setattr(Reactor, "wait", lambda reactor, **_: self._turn(reactor))
        patch.setattr(subprocess, "Popen", self._start)
        patch.setattr(agent, "send_signal", lambda _, signum: self.signals.append(signum))
        patch.setattr(agent, "_print_error", lambda _: None)
        patch.chdir(cwd)
        self._orders, self._news = os.pipe(), os.pipe()
        hello = Hello(
            nonce="n", version=__version__, path=[], cwd=cwd, controller="here",
            lease_s=10.0, grace_s=1.0,
        )  # fmt: skip
        self._agent = agent.Agent(hello, __version__, orders=self._orders[0], news=self._news[1])

    def run(self) -> list[str]:
        """Return the messages of the agent, by their types."""
        try:
            self._agent.run()
            data = os.read(self._news[0], 1 << 20)
        finally:
            self._agent._reactor.close()  # an agent leaves both to the end of its process
            if self._agent._listener is not None:
                self._agent._listener.close()
            self._hang_up()
            for fd in (self._orders[0], *self._news):
                os.close(fd)
        messages = [unpack(content, FromAgent) for _, content in FrameSplitter("n").feed(data)]
        return [type(each).__name__ for each in messages if not isinstance(each, Alive)]

    def _start(self, *_: Any, **__: Any) -> PlayedLauncher:
        if self._is_hit:
            signal.raise_signal(signal.SIGTERM)
        self._launcher = PlayedLauncher()
        return self._launcher

    def _hang_up(self) -> None:
        if self._orders[1] >= 0:
            os.close(self._orders[1])
            self._orders = self._orders[0], -1

    def _turn(self, reactor: Reactor) -> None:
        self._now_s += 0.1
        event = self._events.pop(0) if self._events else GONE
        self._is_hit = event == HIT
        event = event.removesuffix(HIT.removeprefix("start"))
        if event in ORDERS and self._orders[1] >= 0:
            os.write(self._orders[1], pack(ORDERS[event]) + b"\n")
        elif event == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        elif event == GONE:
            self._hang_up()
            self._now_s += 2.0
        elif event == "silence":
            self._now_s += 20.0
        elif event == "the launcher exits" and self._launcher is not None:
            self._launcher.returncode = 0
        self._wait(reactor, most_s=0)


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare each change of a phase with its diagram, and restore what the agent changes."""
    check_phases(monkeypatch, agent.Agent)
    before = {
        signum: signal.getsignal(signum)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def play(*events: str) -> tuple[list[str], list[int]]:
    """Return the messages of an agent, and the signals that its launcher got."""
    with pytest.MonkeyPatch.context() as patch:
        played = Played(patch, events, os.getcwd())
        return played.run(), played.signals


HISTORIES: list[tuple[list[str], list[str], list[int]]] = [
    ([], ["Ready"], []),
    (["stop", "start"], ["Ready"], []),
    (["SIGTERM"], ["Ready"], []),
    (["listen", "start", "the launcher exits"], ["Ready", "Listening", "LauncherEnded"], []),
    (["start", "start", "signal", "the launcher exits"], ["Ready", "LauncherEnded"], [2]),
    ([HIT, "the launcher exits"], ["Ready", "LauncherEnded"], [15]),
    (["start", "SIGTERM", "SIGTERM", "stop"], ["Ready"], [15]),
    (["start", "stop", "the launcher exits", "SIGTERM"], ["Ready", "LauncherEnded"], [15]),
    (["start", "stop unless joined", "the launcher exits"], ["Ready", "LauncherEnded"], [15]),
    (["start", "silence"], ["Ready"], [15]),
]
"""What happens, the messages of the agent, and the signals that its launcher gets."""


@pytest.mark.parametrize(("events", "messages", "signals"), HISTORIES)
def test_an_agent(events: list[str], messages: list[str], signals: list[int]) -> None:
    """It ends its launcher once, and itself last."""
    said, sent = play(*events)

    assert (said[: len(messages)], sent) == (messages, signals)


@given(st.lists(st.sampled_from(EVENTS), max_size=10))
def test_every_agent_ends(events: list[str]) -> None:
    """Whatever happens, and phases follow each other as in the diagram."""
    play(*events)


def test_each_transition_occurs() -> None:
    """Every arrow of the diagram."""
    for events, _, _ in HISTORIES:
        play(*events)

    assert unseen(AgentPhase) == []
