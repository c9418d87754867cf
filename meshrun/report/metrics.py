"""Metrics for Prometheus, and probes: ``--metrics``.

Source:
    https://prometheus.io/docs/specs/om/open_metrics_spec/ for the text: OpenMetrics 1.0, or the
    older format 0.0.4.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal, get_args

from msgspec import Struct

from meshrun import __version__
from meshrun.console.console import Console
from meshrun.errors import HostError, UsageError
from meshrun.host.descriptors import WriteBuffer
from meshrun.host.gpu_state import read_gpu_memory
from meshrun.host.network import listen_on
from meshrun.host.nvml import Driver
from meshrun.host.reactor import Reactor, Timer
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event, NodeLost, RankLate
from meshrun.protocol.generation import Cause
from meshrun.protocol.result import LaunchResult
from meshrun.protocol.zygote_messages import RankBeat
from meshrun.report.rank_status import RankPhase, phase_of
from meshrun.supervisor.watcher import Watcher
from meshrun.wording import count

_RATE_WINDOW_S = 60.0
_OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, object], float]
"""Labels and a value."""
_MOST_BYTES = 16 * 1024
_MOST_CLIENTS = 64
_ACCEPTED_AT_ONCE = 32
"""How many clients are accepted before others are served, so that many in the queue delay none."""
_PAUSE_S = 1.0
"""How long to stop accepting clients when there are no descriptors left."""
_TIMEOUT_NS = 5_000_000_000
"""How long a client may take to send its request and read the response."""


class Family(Struct, frozen=True):
    """One metric with all its samples."""

    name: str
    """Without the prefix ``meshrun_`` and, for a counter, without ``_total``."""
    help: str
    value: float | tuple[Sample, ...]
    """One value without labels, or samples."""
    kind: Literal["gauge", "counter"] = "gauge"


class Metrics(Watcher):
    """Counts events, and serves ``/metrics``, ``/healthz`` and ``/readyz``.

    Raises:
        UsageError: If this machine does not have the address.
        HostError: If the port is taken.
    """

    def __init__(self, plan: LaunchPlan, address: tuple[str, int], console: Console) -> None:
        self._listener = _listen(*address)
        host, port = self._listener.getsockname()[:2]
        place = f"{f'[{host}]' if ':' in host else host}:{port}"
        console.note(f"metrics are at http://{place}/metrics")
        self._driver = Driver(console.note)
        self.update_plan(plan)
        self._began_s = time.monotonic()
        self._restarts: Counter[str] = Counter()
        self._lost_nodes = 0
        self._steps: dict[int, int] = {}
        self._beats: dict[int, float] = {}
        self._late: dict[int, RankLate] = {}
        self._history: deque[tuple[float, int]] = deque()
        """The times at which new steps were reached in the last minute."""
        self._generation = 0

    def begin(self, reactor: Reactor, state: State) -> None:
        """Start to serve."""
        self._state = state
        HttpServer(self._listener, reactor, self._respond)

    def on_event(self, event: Event, state: State) -> None:
        """Count an event, and restarts in the state after it."""
        now_s, self._state = time.monotonic(), state
        if isinstance(event, RankBeat):
            self._beats[event.rank] = now_s
            if event.step is not None:
                self._steps[event.rank] = event.step
                self._reach(event.step, now_s)
        elif isinstance(event, RankLate):
            self._late[event.rank] = event
        elif isinstance(event, NodeLost):
            self._lost_nodes += 1
        if state.generation > self._generation:
            for cause in state.causes[self._generation :]:
                if cause.is_failure:
                    self._restarts[_reason(cause)] += 1
            self._generation = state.generation
            self._beats.clear()
            self._late.clear()
            self._history.clear()

    def end(self, state: State, result: LaunchResult) -> None:  # noqa: ARG002
        """Stop serving."""
        self._listener.close()
        self._driver.close()

    def _reach(self, step: int, now_s: float) -> None:
        if not self._history or step > self._history[-1][1]:
            self._history.append((now_s, step))
        while self._history and self._history[0][0] < now_s - _RATE_WINDOW_S:
            self._history.popleft()

    def _respond(self, path: str, headers: Mapping[str, str]) -> Response:
        if path == "/metrics":
            is_open = "application/openmetrics-text" in headers.get("accept", "")
            text = "".join(f"{line}\n" for line in _lines(self._families(), is_open))
            return Response(text, content_type=_OPEN_METRICS if is_open else _PLAIN)
        if path == "/healthz":
            if self._state.hung is not None:
                return Response("no rank makes progress\n", "503 Service Unavailable")
            return Response("ok\n")
        if path == "/readyz":
            ready = sum(rank_state.ready for rank_state in self._state.ranks.values())
            total = len(self._state.ranks)
            is_ready = ready == total and not self._state.stopping
            status = "200 OK" if is_ready else "503 Service Unavailable"
            return Response(f"{ready} of {count(total, 'rank')} running the program\n", status)
        return Response("use /metrics, /healthz or /readyz\n", "404 Not Found")

    def _families(self) -> Iterator[Family]:
        state, layout, now_s = self._state, self.plan.layout, time.monotonic()
        mesh = str(layout.mesh) if layout.mesh else ""
        info = {"version": __version__, "mesh": mesh, "node_rank": self.plan.node_rank}
        yield Family("info", "The launch; the value is always 1.", ((info, 1),))
        yield Family("uptime_seconds", "Time since the launch began.", now_s - self._began_s)
        yield Family("nodes", "Nodes of the launch.", layout.nnodes)
        yield Family("generation", "The number of the generation, from 0.", state.generation)
        reasons = tuple(({"reason": why}, n) for why, n in sorted(self._restarts.items()))
        yield Family("restarts", "Restarts after failures.", reasons, kind="counter")
        yield Family("node_losses", "Nodes that were lost.", self._lost_nodes, kind="counter")
        phases = Counter(
            phase_of(rank_state, state, has_mesh=layout.mesh is not None)
            for rank_state in state.ranks.values()
        )
        counts = tuple(({"state": phase}, phases[phase]) for phase in get_args(RankPhase))
        yield Family("ranks", "Ranks of this node by state.", counts)
        if state.best_step is not None:
            yield Family("step", "The highest step that a rank reported.", state.best_step)
        if (rate := self._steps_per_second(now_s)) is not None:
            yield Family("steps_per_second", "Steps per second in the last minute.", rate)
        steps = self._per_rank(self._steps)
        yield Family("rank_step", "The highest step of each rank.", steps)
        ages = self._per_rank({rank: now_s - at_s for rank, at_s in self._beats.items()})
        yield Family("rank_heartbeat_age_seconds", "Time since the last heartbeat.", ages)
        lateness = self._per_rank({rank: late.per_call_s for rank, late in self._late.items()})
        yield Family("rank_lateness_seconds", "How late a rank is at each collective.", lateness)
        used = read_gpu_memory(self._driver, self.plan.used_gpus)
        places = {rank: layout.local_rank(rank) for rank in state.ranks}
        if on_gpus := self._per_rank({rank: used[at] for rank, at in places.items() if at in used}):
            about = "Memory in use on the GPU of a rank."
            yield Family("gpu_memory_used_bytes", about, on_gpus)

    def _steps_per_second(self, now_s: float) -> float | None:
        if len(self._history) < 2:
            return None
        (first_s, first), (_, last) = self._history[0], self._history[-1]
        return (last - first) / (now_s - first_s)

    def _per_rank(self, values: Mapping[int, float]) -> tuple[Sample, ...]:
        """Return a sample for each rank, labeled with its coordinate."""
        layout = self.plan.layout
        names = layout.mesh_dim_names or ()
        return tuple(
            ({"rank": rank, **dict(zip(names, layout.coordinate(rank), strict=False))}, value)
            for rank, value in sorted(values.items())
        )


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen_on(address, port)
    except (HostError, UsageError) as error:
        raise type(error)(
            f"--metrics: {error.message}",
            hint="use an address of this machine and a free port; 0 picks any",
        ) from error


def _reason(cause: Cause) -> str:
    """Return a reason without details, as each distinct one is a label."""
    if cause.raised is not None:
        return cause.raised.kind
    return "hang" if "no rank made progress" in cause.description else cause.description


def _lines(families: Iterable[Family], is_open: bool) -> Iterator[str]:
    """Yield the metrics as OpenMetrics if ``is_open``, else in the older format."""
    for family in families:
        name = f"meshrun_{family.name}"
        sample = f"{name}_total" if family.kind == "counter" else name
        named = name if is_open else sample
        yield f"# HELP {named} {_escaped(family.help)}"
        yield f"# TYPE {named} {family.kind}"
        samples = family.value if isinstance(family.value, tuple) else (({}, family.value),)
        for labels, value in samples:
            shown = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
            yield f"{sample}{{{shown}}} {value:.12g}" if shown else f"{sample} {value:.12g}"
    if is_open:
        yield "# EOF"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Response(Struct, frozen=True):
    """The response to a client."""

    body: str
    status: str = "200 OK"
    content_type: str = "text/plain; charset=utf-8"


class _Client(Struct):
    connection: socket.socket
    timer: Timer
    """Closes the connection."""
    received: bytes = b""


class HttpServer:
    """A server of GET and HEAD requests on a listening socket; each response closes its connection.

    Args:
        respond: Called with the path and the headers, whose names are in lower case.
    """

    def __init__(
        self,
        listener: socket.socket,
        reactor: Reactor,
        respond: Callable[[str, Mapping[str, str]], Response],
    ) -> None:
        self._listener, self._reactor, self._respond = listener, reactor, respond
        self._clients: dict[socket.socket, _Client] = {}
        """Ordered by the time of their connection."""
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._reactor.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest():
                    self._reactor.remove(self._listener)  # the clients wait in the queue
                    self._reactor.call_later(_PAUSE_S, self._listen)
                return
            self._add(connection)

    def _add(self, connection: socket.socket) -> None:
        if len(self._clients) >= _MOST_CLIENTS:
            self._drop_oldest()
        connection.setblocking(False)
        until_ns = self._reactor.now_ns() + _TIMEOUT_NS
        timer = self._reactor.call_at(until_ns, partial(self._drop, connection), skips=False)
        client = self._clients[connection] = _Client(connection, timer)
        self._reactor.add_reader(connection, partial(self._read, client))

    def _drop_oldest(self) -> bool:
        """Drop the oldest client to serve others; return whether there was one."""
        oldest = next(iter(self._clients), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.received += data
        head, end, _ = client.received.partition(b"\r\n\r\n")
        if end:
            self._reactor.remove(client.connection)  # it may have shut down its sending side
            drop = partial(self._drop, client.connection)
            buffer = WriteBuffer(client.connection.fileno(), self._reactor, drop)
            buffer.write(self._handle(head.decode("latin-1")))
        elif not data or len(client.received) > _MOST_BYTES:
            self._drop(client.connection)

    def _handle(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return _render(Response("only GET and HEAD\n", "405 Method Not Allowed"))
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        response = self._respond(words[1].partition("?")[0], headers)
        return _render(response, is_head=words[0] == "HEAD")

    def _drop(self, connection: socket.socket) -> None:
        self._clients.pop(connection).timer.cancel()
        self._reactor.drop(connection)


def _render(response: Response, *, is_head: bool = False) -> bytes:
    body = response.body.encode()
    head = (
        f"HTTP/1.1 {response.status}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
