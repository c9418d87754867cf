"""Failures by host, across restarts and jobs: ``--node-history``.

The file has a JSON object a line, so that nodes and jobs that share it can append to it. A failure
is the node's if the program cannot be the reason: a broken device, a node that was lost, a process
that was killed by something else.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshrun.console.console import Console
from meshrun.errors import HostError, MeshrunError, NodeExcludedError
from meshrun.host.exclusion import how_to_exclude, node_name
from meshrun.host.whole_file import check_target, open_at_once
from meshrun.lifecycle.blame import describe_verdict, judge
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event, NodeLost
from meshrun.protocol.from_zygote import Checked, NodeExcluded, RankStarted
from meshrun.protocol.packing import read_json
from meshrun.protocol.printable import one_line
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import LaunchResult
from meshrun.supervisor.watcher import Watcher
from meshrun.wording import count

_DAYS = 30
_DAY_S = 86400
_MANY = 3
"""Failures of a node after which it is named."""
_OF_NODE = re.compile(
    r"CUDA error: (?!device-side assert|out of memory|an illegal memory)|ECC error|NVLink|\bXid\b"
    r"|hardware error|Input/output error|cuda initialization"
)
_SIGNALS = frozenset({signal.SIGBUS, signal.SIGKILL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A line of the file."""

    time: float
    """Seconds since the epoch."""
    host: str
    run_id: str
    reason: str


def note_failure(path: str, host: str, run_id: str, reason: str) -> str | None:
    """Append a failure to the file; return why that cannot be done."""
    line = {"time": time.time(), "host": host, "run_id": run_id, "reason": reason}
    text = f"{json.dumps(line)}\n".encode()
    try:
        check_target(path, "--node-history")  # others may have put a link there since the start
        fd = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # half a line, as a full disk leaves it
                text = b"\n" + text
            while text:
                text = text[os.write(fd, text) :]
        finally:
            os.close(fd)
    except OSError as error:
        return f"cannot write to {path} ({error.strerror})"
    except MeshrunError as error:
        return error.message
    return None


def check_own_history(path: str, most: int) -> None:
    """Check that this node has not failed too often of late.

    Raises:
        NodeExcludedError: If it has.
        HostError: If the file cannot be read.
    """
    host = node_name(os.environ)
    own = [failure for failure in read_history(path) if failure.host == host]
    recent = _recent(own, time.time())
    if len(recent) > most:
        raise NodeExcludedError(
            f"{_describe(recent)}; --max-node-failures is {most}",
            hint=f"leave the node out: {how_to_exclude(host, os.environ)}",
        )


class NodeHistory(Watcher):
    """Appends the failures of this node to a file, and names nodes that fail often."""

    def __init__(self, plan: LaunchPlan, run_id: str, path: str, console: Console) -> None:
        self._path, self._run_id, self._console = path, run_id, console
        self._host = node_name(os.environ)
        self._generation, self._has_line = -1, False
        """The last one whose ranks were started, and whether it has failed."""
        self.replan(plan)
        known = read_history(path)
        if not plan.node_rank:
            self._tell(known)

    def see(self, event: Event, state: State) -> None:
        """Append a failure that is this node's, or of a node that was lost."""
        if isinstance(event, NodeLost):
            self._append(event.host, f"the node was lost: {event.why}")
        elif isinstance(event, RankStarted) and state.generation != self._generation:
            self._generation, self._has_line = state.generation, False
        elif isinstance(event, NodeExcluded) and state.excluded is event:
            self._has_line = True
            self._append(self._host, f"excluded by {event.who}: {event.reason}")
        elif self._has_line:
            return
        elif isinstance(event, Checked) and event.hosts and state.nodes is None:
            self._append(self._host, f"the check before the program found: {event.findings[0]}")
        elif isinstance(event, RankExited | RankRaised) and (why := _why_of_node(state)):
            self._has_line = True
            self._append(self._host, why)

    def replan(self, plan: LaunchPlan) -> None:
        """Take the plan as it is known now; the nodes may have met."""
        self._plan = plan

    def end(self, state: State, result: LaunchResult) -> None:  # noqa: ARG002
        """Name nodes that fail often, after a launch that failed."""
        if result.exit_code and not self._plan.node_rank:
            try:
                self._tell(read_history(self._path))
            except MeshrunError as error:  # it was there at the start
                self._console.note(error.message)

    def _append(self, host: str, reason: str) -> None:
        if (why_not := note_failure(self._path, host, self._run_id, reason)) is not None:
            self._console.note(why_not)

    def _tell(self, known: Iterable[Failure]) -> None:
        for line in describe_history(known, time.time()):
            self._console.note(line)


def read_history(path: str) -> list[Failure]:
    """Return what a file has; nothing if there is none. Lines that are none are passed over.

    Raises:
        UsageError: If the path cannot name a file.
        HostError: If it cannot be read, or could not be written.
    """
    check_target(path, "--node-history")
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise HostError(f"--node-history: `{path}` is not a regular file")
            return list(_parse(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostError(f"--node-history: cannot read `{path}`: {error.strerror}") from error


def describe_history(known: Iterable[Failure], now_s: float) -> Iterator[str]:
    """Yield a line for each node that failed often of late."""
    by_host: dict[str, list[Failure]] = {}
    for failure in _recent(known, now_s):
        by_host.setdefault(failure.host, []).append(failure)
    for host, failures in sorted(by_host.items(), key=lambda item: -len(item[1])):
        if len(failures) >= _MANY:
            yield f"{_describe(failures)}; to leave it out: {how_to_exclude(host, os.environ)}"


def _recent(known: Iterable[Failure], now_s: float) -> list[Failure]:
    begin_s, end_s = now_s - _DAYS * _DAY_S, now_s + _DAY_S  # clocks of nodes differ
    return [failure for failure in known if begin_s < failure.time < end_s]


def _describe(failures: Sequence[Failure]) -> str:
    """Return how often a node failed, and how the last time."""
    last = max(failures, key=lambda failure: failure.time)
    jobs = len({failure.run_id for failure in failures})
    return (
        f"{last.host} failed {count(len(failures), 'time')} in {count(jobs, 'job')} in the last"
        f" {_DAYS} days, most recently because {last.reason}"
    )


def _parse(lines: Iterable[str]) -> Iterator[Failure]:
    for line in lines:
        try:
            found = read_json(line)
            yield Failure(
                time=float(found["time"]),
                host=one_line(str(found["host"])),
                run_id=str(found["run_id"]),
                reason=one_line(str(found["reason"])),
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            continue


def _why_of_node(state: State) -> str | None:
    """Return how the first rank of this node failed, if the program cannot be the reason."""
    for verdict in judge(state):
        if verdict.rank not in state.ranks or verdict.is_consequence or verdict.asked_to_end:
            continue
        raised = verdict.raised
        if verdict.signum in _SIGNALS or (raised and _OF_NODE.search(raised.message)):
            return f"rank {verdict.rank} {describe_verdict(verdict)}"
        return None
    return None
