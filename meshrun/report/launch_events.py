"""Events of a launch for other programs, one JSON object per line: ``--events``.

The classes here are the published schema, ``docs/reference/events.schema.json``. Its version
increases when a field is removed or changes its meaning.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from msgspec import Struct

from meshrun import __version__
from meshrun.console.console import Console
from meshrun.errors import HostError
from meshrun.host.named_files import check_target
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol import events, zygote_messages
from meshrun.protocol.packing import to_builtins
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import LaunchResult, cause_of, signal_name, split_wait_status
from meshrun.supervisor.watcher import Watcher

SCHEMA_NAME = "meshrun.event"
SCHEMA_VERSION = 1
_PROGRESS_INTERVAL_S = 1.0
"""The shortest time between two events of progress."""


def _name(kind: str) -> str:
    """Return the published name of a class of events: ``rank_started``."""
    name = kind.removesuffix("Record")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Record(Struct, frozen=True, tag_field="event", tag=_name):
    """An event that is published; its own fields follow those of every event."""


class LaunchStartedRecord(Record, frozen=True):
    """The launcher of a node has started."""

    program: str
    mesh: str | None
    version: str
    """Of meshrun."""


class NodesJoinedRecord(Record, frozen=True):
    """All nodes have joined."""

    hosts: list[str]
    world_size: int


class RankStartedRecord(Record, frozen=True):
    """The process of a rank was started."""

    rank: int
    pid: int


class RankReadyRecord(Record, frozen=True):
    """A rank starts the program, with its mesh if there is one."""

    rank: int


class ProgressRecord(Record, frozen=True):
    """A rank reported a higher step than any before; at most one per second, and the last."""

    rank: int
    step: int


class RankFailedRecord(Record, frozen=True):
    """An exception left the program of a rank."""

    rank: int
    exception: str
    message: str
    traceback: str


class RankEndedRecord(Record, frozen=True):
    """The process of a rank has ended."""

    rank: int
    exit_code: int | None
    signal: str | None


class SignaledRecord(Record, frozen=True):
    """The launcher received a signal."""

    signal: str


class NoProgressRecord(Record, frozen=True):
    """No rank has made progress for --hang-timeout."""

    idle_s: float
    why: str
    """Which ranks wait in which collective, if that is known."""


class RankLateRecord(Record, frozen=True):
    """Others wait for a rank at collectives, or no longer do; with --stragglers."""

    rank: int
    group: str
    """The group in whose calls it is late."""
    share: float
    """Fraction of the time that the others wait for it; 0 once they no longer do."""
    per_call_s: float


class NodeLostRecord(Record, frozen=True):
    """Another node was lost."""

    lost_node_rank: int
    lost_host: str
    why: str


class CheckedRecord(Record, frozen=True):
    """The check before the program has ended; with --check-first."""

    findings: list[str]
    """The problems that were found."""
    hosts: list[str]
    """The hosts that are to blame."""
    seconds: float


class NodeExcludedRecord(Record, frozen=True):
    """A node is excluded: by exclude_node(), the check before the program, or a broken GPU."""

    rank: int
    reason: str


class AbortedRecord(Record, frozen=True):
    """The ranks of this node are stopped because of another node."""

    why: str


class RestartedRecord(Record, frozen=True):
    """The ranks are restarted."""

    restarts: int
    """Restarts after failures so far."""
    rank: int | None
    """The rank that was the cause."""
    why: str


class LaunchEndedRecord(Record, frozen=True):
    """The launch has ended."""

    exit_code: int
    restarts: int
    rank: int | None
    """The rank that was the cause of a failure."""


def _ended(event: RankExited) -> RankEndedRecord:
    exit_code, signum = split_wait_status(event.wait_status)
    name = None if signum is None else signal_name(signum)
    return RankEndedRecord(rank=event.rank, exit_code=exit_code, signal=name)


_RECORDS: dict[type, Callable[[Any], Record]] = {
    zygote_messages.RankStarted: lambda event: RankStartedRecord(rank=event.rank, pid=event.pid),
    zygote_messages.RankReady: lambda event: RankReadyRecord(rank=event.rank),
    RankRaised: lambda event: RankFailedRecord(
        rank=event.rank,
        exception=event.kind,
        message=event.message,
        traceback=event.traceback,
    ),
    RankExited: _ended,
    events.SignalArrived: lambda event: SignaledRecord(signal=signal_name(event.signum)),
    events.Hung: lambda event: NoProgressRecord(idle_s=round(event.idle_s, 3), why=event.why),
    events.RankLate: lambda event: RankLateRecord(
        rank=event.rank,
        group=event.group,
        share=round(event.share, 3),
        per_call_s=round(event.per_call_s, 6),
    ),
    events.NodeLost: lambda event: NodeLostRecord(
        lost_node_rank=event.node_rank, lost_host=event.host, why=event.why
    ),
    zygote_messages.Checked: lambda event: CheckedRecord(
        findings=event.findings, hosts=event.hosts, seconds=round(event.seconds, 3)
    ),
    zygote_messages.NodeExcluded: lambda event: NodeExcludedRecord(
        rank=event.rank, reason=event.reason
    ),
    events.GenerationAborted: lambda event: AbortedRecord(why=event.why),
}
"""Internal events that are published, and how to convert them."""


class EventLog(Watcher):
    """Turns events into lines of JSON."""

    def __init__(self, plan: LaunchPlan, run_id: str, emit: Callable[[str], None]) -> None:
        self.update_plan(plan)
        self._run_id, self._emit = run_id, emit
        self._host = os.uname().nodename
        self._generation = 0
        self._step = -1
        self._last: ProgressRecord | None = None
        """The last progress, until it is written."""
        self._progress_written_s = 0.0

    def on_event(self, event: events.Event, state: State) -> None:
        """Write a line if the event is published."""
        if state.generation > self._generation:
            self._generation, self._step = state.generation, -1
            cause, restarts = state.causes[-1], state.restarts
            self._write(RestartedRecord(restarts=restarts, rank=cause.rank, why=cause.description))
        if isinstance(event, RankExited) and self._last is not None:
            self._write(self._last)
            self._last = None
        if (record := self._record(event)) is not None:
            self._write(record)

    def end(self, state: State, result: LaunchResult) -> None:  # noqa: ARG002
        """Write the last line."""
        cause = cause_of(result)
        rank = None if cause is None else cause.rank
        self._write(
            LaunchEndedRecord(exit_code=result.exit_code, restarts=result.restarts, rank=rank)
        )

    def _record(self, event: events.Event) -> Record | None:
        if isinstance(event, events.LaunchBegan):
            mesh, program = self.plan.layout.mesh, self.plan.program.target
            name = str(mesh) if mesh else None
            return LaunchStartedRecord(program=program, mesh=name, version=__version__)
        if isinstance(event, events.AllJoined):
            size = self.plan.layout.world_size
            return NodesJoinedRecord(hosts=list(event.hosts), world_size=size)
        if isinstance(event, zygote_messages.RankBeat):
            return None if event.step is None else self._progress(event.rank, event.step)
        make = _RECORDS.get(type(event))
        return None if make is None else make(event)

    def _progress(self, rank: int, step: int) -> ProgressRecord | None:
        now_s = time.monotonic()
        if step <= self._step:
            return None
        self._step, self._last = step, ProgressRecord(rank=rank, step=step)
        if now_s < self._progress_written_s + _PROGRESS_INTERVAL_S:
            return None
        progress, self._last, self._progress_written_s = self._last, None, now_s
        return progress

    def _write(self, record: Record) -> None:
        values = {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "run_id": self._run_id,
            "host": self._host,
            "node_rank": self.plan.node_rank,
            "generation": self._generation,
            **to_builtins(record),
        }
        self._emit(json.dumps(values))


def open_event_log(plan: LaunchPlan, run_id: str, path: str, console: Console) -> EventLog:
    """Return an event log that appends to a file; ``-`` is stdout.

    Raises:
        UsageError: If the path cannot name a file.
        HostError: If the file cannot be opened.
    """
    if path == "-":
        return EventLog(plan, run_id, console.print_record)
    check_target(path, "--events")
    try:
        # O_NONBLOCK: do not wait for a pipe without a reader, or for a full one.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        why = "no process reads it" if error.errno == errno.ENXIO else error.strerror
        raise HostError(f"--events: cannot open `{path}`: {why}") from error
    return EventLog(plan, run_id, WholeLines(fd, path, console.note).write)


class WholeLines:
    """Writes whole lines to a file or pipe; lines that do not fit into a full pipe are lost."""

    def __init__(self, fd: int, path: str, note: Callable[[str], None]) -> None:
        self._fd, self._path, self._note = fd, path, note
        self._rest = b""
        """The rest of a line that was written in part."""
        self._has_noted_loss = False

    def write(self, line: str) -> None:
        """Write a line unless the pipe is full; the rest of a partial one precedes the next."""
        begun, text = self._rest, f"{line}\n".encode()
        written, why = 0, "its reader is slow"
        try:
            written = os.write(self._fd, begun + text)
        except OSError as error:
            why = error.strerror or str(error)
        is_lost = written <= len(begun)
        self._rest = begun[written:] if is_lost else (begun + text)[written:]
        if is_lost and not self._has_noted_loss:
            self._has_noted_loss = True
            self._note(f"cannot write to {self._path} ({why}); events are lost")
