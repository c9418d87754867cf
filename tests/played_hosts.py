"""Launches on hosts whose agents a test plays; controller, connections and timers are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import pytest

from meshrun.cli.option import COMMAND_LINE
from meshrun.cli.options import Options
from meshrun.cli.read import build_request, with_hosts
from meshrun.console.console import Console
from meshrun.errors import MeshrunError
from meshrun.host.reactor import Reactor
from meshrun.plan.rank_program import Program
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.packing import pack, unpack
from meshrun.ssh import connect, controller
from meshrun.ssh.agent_messages import (
    MESSAGE,
    AgentError,
    Alive,
    FromAgent,
    LauncherEnded,
    LauncherError,
    Listening,
    Ready,
    SignalLauncher,
    StartLauncher,
    StopLauncher,
    ToAgent,
    frame,
    greeting,
)
from meshrun.ssh.connect import StoppedBySignal
from meshrun.ssh.host_session import FirstLost

Event = tuple[int | None, str]
"""What happens to a host, by its number, or to none."""
EXITS = {
    "finishes": (0, True), "fails": (1, True), "is killed": (-9, True),
    "is stopped": (-signal.SIGTERM, True), "is stopped early": (-signal.SIGTERM, False),
}  # fmt: skip
"""The end of a launcher: its exit code, and whether all nodes had joined."""
ERRORS = {
    "cannot launch": {"kind": "HostError", "message": "no room", "hint": None, "exit_code": 71},
    "is unfit": {"kind": "NodeExcludedError", "message": "bad", "hint": None, "exit_code": 78},
}
OF_A_HOST = (
    *EXITS,
    *ERRORS,
    "answers",
    "cannot serve",
    "vanishes",
    "freezes",
    "is cut off",
    "babbles",
)
OF_NO_HOST = ("SIGINT", "SIGTERM", "SIGQUIT", "a turn", "4 s", "20 s")
_TURN_S = 0.05
_MOST_TURNS = 2000


class PlayedAgent:
    """ssh as the controller sees it, and behind it an agent without a launcher."""

    def __init__(self, host: int) -> None:
        self.host, self.pid = host, 0
        self.returncode: int | None = None
        self._orders, to_agent = os.pipe()
        from_agent, self._out = os.pipe()
        from_ssh, self._err = os.pipe()
        os.set_blocking(self._orders, False)
        self.stdin = os.fdopen(to_agent, "wb", 0)
        self.stdout, self.stderr = os.fdopen(from_agent, "rb", 0), os.fdopen(from_ssh, "rb", 0)
        self._line = b""
        self.nonce = ""
        self.has_answered = self.is_frozen = self.is_launched = self.must_end = False
        self.received: list[str] = []

    def poll(self) -> int:
        """Return the exit code of ssh, which ends at once whenever it is looked at."""
        return self.wait()

    def wait(self, _timeout: float = 0.0) -> int:
        """End."""
        self.end(0)
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Exit."""
        if self.returncode is None:
            self.read()
            self.returncode = code
            for fd in (self._orders, self._out, self._err):
                os.close(fd)

    def say(self, *messages: FromAgent) -> None:
        """Send messages."""
        self._write(b"".join(frame(MESSAGE, pack(each)) for each in messages))

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the controller has closed it
            os.write(self._out, data)

    def read(self) -> None:
        """Read orders."""
        with suppress(OSError):
            *lines, self._line = (self._line + os.read(self._orders, 1 << 20)).split(b"\n")
            for line in lines:
                if not self.nonce:
                    self.nonce = json.loads(line)["nonce"]
                else:
                    self._obey(unpack(line, ToAgent))

    def _obey(self, order: ToAgent) -> None:
        if isinstance(order, Alive):
            return
        self.received.append(type(order).__name__)
        match order:
            case StartLauncher():
                self.is_launched = True
                words = " ".join(order.words)
                self.received[-1] += f" {words} {order.env['MESHRUN_HOSTS_PRESENT']}"
            case StopLauncher():
                self.received[-1] += f" {order.why}"
                self.must_end |= order.even_if_joined
            case SignalLauncher():
                self.received[-1] += f" {order.signum} {order.even_if_joined}"
                self.must_end |= order.signum != signal.SIGQUIT

    def turn(self) -> None:
        """Read orders, and show that it is alive."""
        if self.returncode is not None:
            return
        self.read()
        if self.received[-1:] == ["Listen"] and self.has_answered and not self.is_frozen:
            self.received[-1] = "listens"
            self.say(Listening(address="10.0.0.1", port=1))
        elif self.has_answered and not self.is_frozen:
            self.say(Alive())

    def suffer(self, what: str) -> None:
        """Let something happen to it, if it can."""
        if self.returncode is not None:
            return
        self.read()
        if what == "vanishes":
            self.end(255)
        elif what == "freezes":
            self.is_frozen = True
        elif what == "babbles":
            self._write(greeting(self.nonce) + b"?" * 9)
        elif what in ("answers", "cannot serve") and not self.has_answered:
            self.has_answered = True
            self._write(greeting(self.nonce))
            ready = Ready(own="", theirs="", machine=str(self.host))
            self.say(ready if what == "answers" else AgentError(why="no", hint="h"))
            os.write(self._err, b"a banner\n")  # of ssh, which may be read after the answer
        elif what == "cannot serve":
            self.say(AgentError(why="no port", hint="h"))
        elif self.is_launched and self.has_answered:
            self._end_launcher(what)

    def _end_launcher(self, what: str) -> None:
        why = ""
        if what in ERRORS:
            self.say(LauncherError(text=json.dumps(ERRORS[what])))
            code, has_joined = ERRORS[what]["exit_code"], False
        elif what == "is cut off":
            code, has_joined, why = 1, True, "no message from the host"
        else:
            code, has_joined = EXITS.get(what, (0, True))
        self.say(LauncherEnded(code=code, has_joined=has_joined, why=why))
        self.end(0)


class PlayedLaunch:
    """A launch on hosts, with what happens to them in each turn of the controller's loop.

    After the last event, launchers end as they were asked to, or else finish.
    """

    def __init__(self, patch: pytest.MonkeyPatch, events: Sequence[Event], output: int) -> None:
        self._events = list(events)
        self._signals: list[int] = []
        self._now_s, self._turns = 1000.0, 0
        self.agents: list[PlayedAgent] = []
        self._wait = Reactor.wait
        patch.setattr(connect, "Reactor", partial(Reactor, clock_ns=lambda: int(self._now_s * 1e9)))
        patch.setattr(subprocess, "Popen", self._start)
        patch.setattr(Reactor, "wait", lambda reactor, **_: self._turn(reactor))
        patch.setattr(connect, "Console", partial(Console, output, output))
        patch.setattr(controller, "SignalQueue", lambda *_, **__: self)
        patch.setattr(controller, "is_stopped", lambda _: False)

    def run(self, request: LaunchRequest) -> str:
        """Return how it ended."""
        excluded: dict[str, str] = {}
        self._wakes = os.pipe()
        try:
            for _ in range(3):
                run = controller.Controller(request, ["x.py"], excluded=excluded)
                try:
                    return f"code {run.run()}"
                except FirstLost as error:
                    outcome = f"FirstLost: {error.message}"
                except MeshrunError as error:
                    return f"{type(error).__name__}: {error.message}"
                except StoppedBySignal as error:
                    return f"stopped by {error.signum}"
            return outcome
        finally:
            for end in self._wakes:
                os.close(end)

    def _start(self, command: list[str], **_: Any) -> PlayedAgent:
        agent = PlayedAgent(int(command[-2].removeprefix("host")))
        self.agents.append(agent)
        return agent

    def _turn(self, reactor: Reactor) -> None:
        self._now_s += _TURN_S
        self._turns += 1
        assert self._turns < _MOST_TURNS, "the launch does not end"
        living = [agent for agent in self.agents if agent.returncode is None]
        if self._events:
            host, what = self._events.pop(0)
            for agent in living:
                if agent.host == host:
                    agent.suffer(what)
            if host is None:
                self._pass(what)
        else:
            self._now_s += 1.0
            for agent in living[:1] if self._turns % 3 else living:
                agent.read()
                agent.suffer("is stopped" if agent.must_end else "answers")
                if not agent.must_end:
                    agent.suffer("finishes")
        for agent in living:
            agent.turn()
        self._wait(reactor, most_s=0)

    def _pass(self, what: str) -> None:
        if what.startswith("SIG"):
            self._signals.append(signal.Signals[what])
        else:
            self._now_s += {"a turn": 0.0, "4 s": 4.0}.get(what, 20.0)

    # ---- as the queue of signals ------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that never becomes ready."""
        return self._wakes[0]

    def take(self) -> list[int]:
        """Return the signals that have arrived."""
        taken, self._signals = self._signals, []
        return taken

    def restore_late(self) -> None:
        """Do nothing."""


class Played(NamedTuple):
    """How a launch ended."""

    outcome: str
    text: str
    """The output."""
    agents: list[PlayedAgent]


def play(events: Sequence[Event], *, hosts: int = 3, **options: str) -> Played:
    """Launch on hosts ``host0``, ``host1`` and so on with some options; return how that ended."""
    request = _request(hosts, **options)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as output:
        patch.setenv("MESHRUN_SECRET", "s")
        launch = PlayedLaunch(patch, events, output.fileno())
        outcome = launch.run(request)
        assert all(agent.returncode is not None for agent in launch.agents), "an ssh is left"
        output.seek(0)
        return Played(outcome, output.read().decode(), launch.agents)


@cache
def _request(hosts: int, **options: str) -> LaunchRequest:
    values = {"node_timeout": "3", "shutdown_timeout": "2", **options}
    values["hosts"] = ",".join(f"host{number}" for number in range(hosts))
    read = Options(values, dict.fromkeys(values, COMMAND_LINE), {})
    return with_hosts(build_request(read, Program(kind="script", target="x.py")), read)
