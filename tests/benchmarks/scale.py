"""A coordinator with thousands of participants: the real protocol in a few processes.

    python -m tests.benchmarks.scale [NODES ...]

The coordinator is the real one, alone in its process. Participants are lightweight: they
authenticate, join, answer heartbeats and report failures, but start nothing. All share the machine,
so the coordinator's CPU time says more than wall time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

from meshrun.host.network import listen_on
from meshrun.host.reactor import Reactor
from meshrun.protocol.events import NextBegins
from meshrun.protocol.generation import Cause, NodeOutcome
from meshrun.rendezvous import connection as connection_module
from meshrun.rendezvous.connection import Connection, beat_s
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.handshake import ParticipantHandshake
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.lobby import Lobby
from meshrun.rendezvous.membership import fit_without_mesh
from meshrun.rendezvous.messages import Failed, Join, Message, decode
from meshrun.rendezvous.this_node import ThisNode
from tests.plans import config_of

SECRET = b"s" * 32
_PROCESSES = 2
_STEADY_S = 20.0
_NODE_TIMEOUT_S = 30.0
_RETRY_S = 0.5
_AT_ONCE = 200
"""Connections that a process opens before it handles what has arrived."""


class Participants:
    """Some of the nodes, each with its own address."""

    def __init__(self, numbers: range, nodes: int, port: int) -> None:
        self.numbers, self._port = numbers, port
        self.reactor = Reactor()
        self._hub = Hub(self.reactor, print)
        self._hub.reported_idle_s = 0.0
        self._every_s = beat_s(nodes, _NODE_TIMEOUT_S)
        self.received: dict[str, set[int]] = {}
        self.connections: dict[int, Connection] = {}
        self.reconnects = 0

    def connect_all(self) -> None:
        for place, number in enumerate(self.numbers):
            self._connect(number)
            if place % _AT_ONCE == 0:
                self.reactor.turn(most_s=0)

    def _connect(self, number: int) -> None:
        own = f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"
        sock = socket.create_connection(("127.0.0.1", self._port), source_address=(own, 0))
        link = Connection(sock, ParticipantHandshake(SECRET), self._hub, beat_s=self._every_s)
        self.connections[number] = link
        link.watch(partial(self._on_ready, number))
        link.send(
            Join(
                host=f"node{number}.cluster.example", node_rank=number, nproc=8,
                settings={"--mesh": "dp=-1,tp=8"}, launcher=f"{number:032}",
            )
        )  # fmt: skip

    def _on_ready(self, number: int) -> None:
        link = self.connections[number]
        for message in link.receive():
            self.received.setdefault(type(message).__name__, set()).add(number)
        if link.closed is not None and number not in self.received.get("Welcome", ()):
            self.reconnects += 1
            self.reactor.call_later(_RETRY_S, partial(self._connect, number))

    def wait_for(self, name: str) -> None:
        everyone = len(self.numbers)
        self.reactor.run_until(lambda: len(self.received.get(name, ())) >= everyone)

    def cut(self) -> None:
        """Lose all connections at once, then reconnect."""
        self.received.clear()
        for number, link in list(self.connections.items()):
            link.close("cut")
            self.reactor.call_later(random.random() * _RETRY_S, partial(self._connect, number))

    def fail(self, number: int) -> None:
        """Report that a node's ranks failed; that node gets no ``GenerationAborted`` itself."""
        link = self.connections[number]
        link.send(Failed(generation=0, outcome=NodeOutcome(headline="rank 8 failed")))
        self.received.setdefault("GenerationAborted", set()).add(number)


def play_participants(numbers: range, nodes: int, port: int, pipe: Pipe) -> None:
    """Act as some of the nodes, and report when all of them have each message."""
    _many_descriptors()
    connection_module.decode = _decode_lightly
    played = Participants(numbers, nodes, port)
    pipe.recv()
    played.connect_all()
    pipe.send(time.monotonic())
    played.wait_for("Welcome")
    pipe.send((time.monotonic(), played.reconnects))
    while (order := _order(pipe, played.reactor)) != "end":
        if order == "fail":
            pipe.send(time.monotonic())
            played.fail(numbers[0])
        elif order == "wait":
            played.wait_for("GenerationAborted")
            pipe.send(time.monotonic())
        elif order == "cut":
            pipe.send(time.monotonic())
            played.cut()
            played.wait_for("Welcome")
            pipe.send(time.monotonic())
    os._exit(0)


def _order(pipe: Pipe, reactor: Reactor) -> str:
    while not pipe.poll():
        reactor.turn(most_s=0.05)
    return str(pipe.recv())


class _Seen:
    """A message not decoded here; real nodes would each decode it on their own machine."""


class Welcome(_Seen):
    """The place of a node."""


def _decode_lightly(text: bytes, ahead_ns: int) -> Message:
    if text.startswith(b'["Welcome"'):
        return Welcome()  # type: ignore[return-value]
    return decode(text, ahead_ns)


def _many_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def play_coordinator(nodes: int, listener: socket.socket, pipe: Pipe) -> None:
    """Act as node 0, and answer requests for its memory and CPU time so far."""
    _many_descriptors()
    reactor = Reactor()
    hub = Hub(reactor, lambda _: None)
    sides: list[Any] = []
    own = Join(host="node0", node_rank=0, nproc=8, settings={"--mesh": "dp=-1,tp=8"})
    config = config_of(
        nodes, host="127.0.0.1", port=listener.getsockname()[1], timeout_s=600,
        last_call_s=None, return_s=30, node_timeout_s=_NODE_TIMEOUT_S, run_id="run", node_rank=0,
    )  # fmt: skip
    node = ThisNode(config=config, info=own, secret=SECRET, hub=hub, fit=fit_without_mesh)
    sides.append(Lobby(node, listener=listener, run_id="run", hand_over=sides.append))
    pipe.send("ready")
    while (order := _order(pipe, reactor)) != "end":
        hub.events.clear()
        if order == "restart":
            cause = Cause(description="x", at_ns=0)
            sides[-1].send(NextBegins(generation=1, cause=cause, at_ns=0))
            continue
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((order, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime, len(sides)))
    assert isinstance(sides[-1], Coordinator)
    os._exit(0)


def measure(nodes: int) -> dict[str, float]:
    """Return the time, CPU time and memory that this many nodes take."""
    listener = listen_on("127.0.0.1", 0)
    port = listener.getsockname()[1]
    head, theirs = multiprocessing.Pipe()
    processes = [_start(play_coordinator, nodes, listener, theirs)]
    head.recv()
    base = _ask(head)[1]
    pipes, others_of = [], []
    each = -(-(nodes - 1) // _PROCESSES)
    for first in range(1, nodes, each):
        ours, others = multiprocessing.Pipe()
        others_of.append(others)
        numbers = range(first, min(first + each, nodes))
        processes.append(_start(play_participants, numbers, nodes, port, others))
        pipes.append(ours)
    began = time.monotonic()
    for pipe in pipes:
        pipe.send("connect")
    connected = max(pipe.recv() for pipe in pipes)
    joined, reconnects = max(pipe.recv() for pipe in pipes)
    before = _ask(head)
    time.sleep(2 + 4 * beat_s(nodes, _NODE_TIMEOUT_S))
    resting = _ask(head)
    time.sleep(_STEADY_S)
    after = _ask(head)
    pipes[0].send("fail")
    failed = pipes[0].recv()
    for pipe in pipes:
        pipe.send("wait")
    notified = max(pipe.recv() for pipe in pipes)
    cpu_to_notify = _ask(head)[2] - after[2]
    before_storm = _ask(head)[2]
    for pipe in pipes:
        pipe.send("cut")
    cut = min(pipe.recv() for pipe in pipes)
    head.send("restart")
    back = max(pipe.recv() for pipe in pipes)
    used = _ask(head)
    for pipe in (head, *pipes):
        pipe.send("end")
    for process in processes:
        process.join()
        process.close()
    for pipe in (head, theirs, *pipes, *others_of):
        pipe.close()
    listener.close()
    return {
        "nodes": nodes,
        "connected_s": round(connected - began, 2),
        "joined_after_last_s": round(joined - connected, 2),
        "cpu_to_join_s": round(before[2], 2),
        "reconnects": reconnects,
        "peak_MB": round(after[1] / 1e6),
        "base_MB": round(base / 1e6),
        "beats_core": round((after[2] - resting[2]) / _STEADY_S, 3),
        "notified_s": round(notified - failed, 3),
        "cpu_to_notify_s": round(cpu_to_notify, 3),
        "back_after_cut_s": round(back - cut, 2),
        "cpu_to_be_back_s": round(used[2] - before_storm, 2),
        "peak_after_storm_MB": round(used[1] / 1e6),
    }


def _ask(pipe: Pipe) -> Any:
    pipe.send("usage")
    return pipe.recv()


def _start(call: Callable[..., None], *args: Any) -> multiprocessing.Process:
    process = multiprocessing.Process(target=call, args=args)
    process.start()
    return process


if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or ["1000", "10000"]):
        print(json.dumps(measure(number)), flush=True)
